"""Layers named after their papers, each over a split sequence, packed documents, or token by token.

A new layer is a subclass of `Layer` in one file here, listed in `LAYERS`; models and tests go through the list.
"""

from .attention import Attention
from .decoding import KVCache
from .delta import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from .delta_kin import Comba, GatedDeltaNet2, GatedDeltaProduct
from .dsa import DeepSeekSparseAttention
from .fox import ForgettingAttention
from .gla import HGRN2, GatedLinearAttention
from .gsa import GatedSlotAttention
from .hgrn import HGRN
from .latent import MultiheadLatentAttention
from .layer import Layer, LayerOutput, LayerState
from .linear_attention import LinearAttention
from .mamba2 import Mamba2
from .mamba3 import Mamba3
from .mesa import MesaNet
from .moba import MixtureOfBlockAttention
from .moe import MixtureOfExperts, MoEOutput, Routing
from .momentum import MomentumDeltaNet
from .parts import RMSNorm
from .preconditioned import PreconditionedGatedDeltaNet, PreconditionedKDA
from .retention import LightningAttention, MultiScaleRetention
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7
from .shares import ABCAttention, LightNet
from .sparse import NativeSparseAttention
from .ttt import TTTLinear
from .xlstm import MLSTM

LAYERS: dict[str, type[Layer]] = {
    "attention": Attention,
    "mla": MultiheadLatentAttention,
    "nsa": NativeSparseAttention,
    "dsa": DeepSeekSparseAttention,
    "moba": MixtureOfBlockAttention,
    "linear_attention": LinearAttention,
    "retention": MultiScaleRetention,
    "lightning": LightningAttention,
    "gla": GatedLinearAttention,
    "hgrn2": HGRN2,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gdn": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "rwkv7": RWKV7,
    "comba": Comba,
    "gdn2": GatedDeltaNet2,
    "gated_delta_product": GatedDeltaProduct,
    "mlstm": MLSTM,
    "rwkv6": RWKV6,
    "hgrn": HGRN,
    "gsa": GatedSlotAttention,
    "mamba3": Mamba3,
    "fox": ForgettingAttention,
    "ttt": TTTLinear,
    "preconditioned_gdn": PreconditionedGatedDeltaNet,
    "preconditioned_kda": PreconditionedKDA,
    "momentum_deltanet": MomentumDeltaNet,
    "mesa_net": MesaNet,
    "lightnet": LightNet,
    "abc": ABCAttention,
}
"""Names of the layers in a model's list."""

__all__ = [
    "ABCAttention",
    "Attention",
    "Comba",
    "DeepSeekSparseAttention",
    "DeltaNet",
    "ForgettingAttention",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedSlotAttention",
    "HGRN",
    "HGRN2",
    "KVCache",
    "KimiDeltaAttention",
    "LAYERS",
    "Layer",
    "LayerOutput",
    "LayerState",
    "LightNet",
    "LightningAttention",
    "LinearAttention",
    "MLSTM",
    "Mamba2",
    "Mamba3",
    "MesaNet",
    "MixtureOfBlockAttention",
    "MixtureOfExperts",
    "MoEOutput",
    "MomentumDeltaNet",
    "MultiScaleRetention",
    "MultiheadLatentAttention",
    "NativeSparseAttention",
    "PreconditionedGatedDeltaNet",
    "PreconditionedKDA",
    "RMSNorm",
    "RWKV6",
    "RWKV7",
    "Routing",
    "TTTLinear",
]
