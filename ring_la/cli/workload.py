"""What a `HybridLM` asks of one rank: parameters, operations, states and saved bytes a token, read off the model.

The model is built on the meta device, so that no size is too large: parameters are counted, states have the shape one
token leaves behind, and the bytes saved for the backward pass are those autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ..algebra import Affine
from ..errors import UnsupportedError
from ..models import HybridConfig
from ..models.block import ResidualBlock
from ..nn import (
    Attention,
    DeepSeekSparseAttention,
    MixtureOfBlockAttention,
    MixtureOfExperts,
    MultiheadLatentAttention,
    NativeSparseAttention,
)
from .transitions import TRANSITIONS

RECURRENCES = {
    "linear_attention": "linear_attention", "retention": "retention", "lightning": "retention", "gla": "gla",
    "hgrn2": "gla", "mamba2": "simple_gla", "deltanet": "delta_rule", "gdn": "gated_delta_rule", "kda": "kda",
    "rwkv7": "kda", "comba": "gated_delta_rule", "gdn2": "kda", "gated_delta_product": "gated_delta_rule",
    "mlstm": "simple_gla", "rwkv6": "gla", "hgrn": "simple_gla", "gsa": "gla", "mamba3": "simple_gla",
    "ttt": "delta_rule", "preconditioned_gdn": "gated_delta_rule", "preconditioned_kda": "kda",
    "momentum_deltanet": "gated_delta_rule", "mesa_net": "simple_gla", "lightnet": "gla", "abc": "gla",
    "log_linear_mamba2": "simple_gla",
}  # fmt: skip
"""Layer: the recurrence of `ring-la bench scan` whose rate stands for it (the same rule, or the next dearer one)."""
PROBE = 128


@dataclass(frozen=True)
class BlockWork:
    """One block: a layer along the sequence and its MLP.

    Attributes:
        parameters: of the block. multiplied: those a token is multiplied with (of experts, the active ones).
        layer_saved, mlp_saved, norm_saved: bytes kept for the backward pass, a token: by the layer, by the MLP, and by
            each of the two norms before them.
        recurrence: name in `TRANSITIONS`; "" for attention.
        heads, K, V: of the state; of attention, query heads and their width twice (of latents, the mean of K and V).
        kv: bytes of keys and values, or of the latent, a token (attention). window: earlier keys a query sees, −1: all.
        chosen: keys that a query picks of all; 0: none are picked. indexed: heads and channels of its indexer.
        experts: parameters of stacked experts. met: those of them that a token is multiplied with. routed: bytes of a
            token's rows, one for each of its experts, where these may be on other ranks.
    """

    layer: str
    parameters: int
    multiplied: int
    layer_saved: float
    mlp_saved: float
    norm_saved: float
    recurrence: str
    heads: int
    K: int
    V: int
    kv: int = 0
    experts: int = 0
    met: int = 0
    routed: int = 0
    window: int = -1
    chosen: int = 0
    indexed: tuple[int, int] = (0, 0)

    @property
    def saved(self) -> float:
        """Bytes kept for the backward pass, a token, where nothing is recomputed."""
        return self.layer_saved + self.mlp_saved + 2 * self.norm_saved

    @property
    def state(self) -> Affine:
        """A map of this layer's state."""
        return Affine(TRANSITIONS[self.recurrence], None, torch.empty(1, self.heads, self.K, self.V, device="meta"))


@dataclass(frozen=True)
class Workload:
    """A model: its blocks, and the embedding with the output projection."""

    dim: int
    blocks: tuple[BlockWork, ...]
    ends: int
    """Parameters of embedding, last norm and head."""
    vocabulary: int
    library: bool = False
    """Whether what is between products and recurrences is Transformers' own."""

    @property
    def head(self) -> int:
        """Parameters that a token is multiplied with for its logits."""
        return self.dim * self.vocabulary

    @property
    def parameters(self) -> int:
        return self.ends + sum(block.parameters for block in self.blocks)

    @classmethod
    def of(cls, config: HybridConfig) -> Workload:
        """Read off the model of this configuration, in bf16."""
        kinds: dict[str, BlockWork] = {}
        for name in dict.fromkeys(config.layers):
            one = HybridConfig(**config.to_dict() | {"layers": [name], "vocab_size": 1})
            with torch.device("meta"):
                block = ResidualBlock.of(one, 0).bfloat16()
                kinds[name] = replace(_work(name, block, config), met=_met(block, config))
        ends = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2) + config.dim
        return cls(config.dim, tuple(kinds[name] for name in config.layers), ends, config.vocab_size)


def _work(name: str, block: ResidualBlock, config: HybridConfig) -> BlockWork:
    parameters = sum(p.numel() for p in block.parameters())
    multiplied = sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear)) + _met(block, config)
    if isinstance(block.mlp, MixtureOfExperts):
        top_k, hidden = config.mlp_options["top_k"], config.mlp_dim or 32 * -(-8 * config.dim // (3 * 32))
        mlp = 2 * top_k * (2 * config.dim + 4 * hidden)
    else:
        mlp = _saved(block.mlp, config.dim)
    layer, norm = block.layer, _saved(block.layer_norm, config.dim)
    if isinstance(layer, (NativeSparseAttention, MixtureOfBlockAttention)):
        raise UnsupportedError("layers", "layers whose rates were measured", repr(name), "Chosen blocks have none yet")
    if isinstance(layer, Attention):
        heads, width = layer.num_heads, layer.widths[0] // layer.num_heads
        saved = 2 * (config.dim + 2 * sum(layer.widths) + heads * width)  # x; q, k, v before and after RoPE; o
        kv = 2 * sum(layer.widths[1:])
        own = BlockWork(name, parameters, multiplied, saved, mlp, norm, "", heads, width, width, kv)
        return replace(own, window=layer.window)
    if isinstance(layer, MultiheadLatentAttention):
        heads, (K, V), latent = layer.num_heads, (sum(layer.q_widths), layer.v_up.shape[1]), sum(layer.widths)
        multiplied += layer.k_up.numel() + layer.v_up.numel()
        down = 0 if layer.q_down is None else 2 * layer.q_proj.in_features  # before and after its norm
        saved = 2 * (config.dim + down + 2 * heads * K + 2 * latent + heads * V)
        width = (K + V) // 2
        own = BlockWork(name, parameters, multiplied, saved, mlp, norm, "", heads, width, width, 2 * latent)
        return _choosing(layer, own) if isinstance(layer, DeepSeekSparseAttention) else own
    x = torch.empty(1, 1, config.dim, device="meta", dtype=torch.bfloat16)
    _, heads, K, V = layer(x, output_state=True).state.recurrent.shape
    return BlockWork(name, parameters, multiplied, _saved(layer, config.dim), mlp, norm, RECURRENCES[name], heads, K, V)


def _met(block: ResidualBlock, config: HybridConfig) -> int:
    """Parameters of a mixture's experts that a token is multiplied with."""
    if not isinstance(block.mlp, MixtureOfExperts):
        return 0
    stacked = sum(p.numel() for p in block.mlp.parameters() if p.dim() == 3)
    return stacked * config.mlp_options["top_k"] // config.mlp_options["experts"]


def _choosing(layer: DeepSeekSparseAttention, own: BlockWork) -> BlockWork:
    """The same with an indexer, of which the choice and the gradients of its loss are kept."""
    heads, D = layer.indexer.heads, layer.indexer.k_norm.normalized_shape[0]
    saved = own.layer_saved + 4 * layer.topk + 4 * (heads + 1) * D
    return replace(own, layer_saved=saved, chosen=layer.topk, indexed=(heads, D))


def _saved(module: nn.Module, dim: int) -> float:
    """Bytes autograd keeps a token: the slope between two lengths, so that weights do not count."""

    def held(tokens: int) -> int:
        storages = {}

        def keep(t: torch.Tensor) -> torch.Tensor:
            storages[t.untyped_storage()._cdata] = t.untyped_storage()
            return t

        x = torch.empty(1, tokens, dim, device="meta", dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = module(x)
        del out
        return sum(s.nbytes() for s in storages.values())

    return (held(2 * PROBE) - held(PROBE)) / PROBE
