"""Multi-head latent attention: DeepSeek-V2 and -V3, Kimi-Linear, Ling 2.5, GLM-4.7-Flash, MiniCPM3 and their like.

Their forward asks ``expand_kv(latent, rotary)`` for keys and values and gives these to an attention function. Here it
gets latents back, and the attention function makes keys and values of them where they arrive: latents travel.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..attention import attend_latents
from ..call import ModelCall
from .indexed import Overriding, forward_with


class Latents:
    """In place of the registry of attention functions: what comes for keys and values are latents."""

    @staticmethod
    def get_interface(name: str, eager: Callable) -> Callable:
        return attend_latents


def as_they_are(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """In place of ``expand_kv``."""
    return latent, rotary


def latent_attention(call: ModelCall, layer: nn.Module, *args, **keywords):
    """A layer with ``expand_kv``. Where its ``kv_b_proj`` is more than one whole matrix (an adapter, quantised, sharded
    by itself) it runs as it is, and expanded keys travel."""
    up = layer.kv_b_proj
    if type(up) is not nn.Linear or up.bias is not None or isinstance(up.weight, DTensor):
        return type(layer).forward(layer, *args, **keywords)
    own = Overriding(layer, expand_kv=as_they_are)
    return forward_with(layer, Latents)(own, *args, **keywords)


CLASSES = (
    "AXK1Attention",
    "BailingHybridAttention",
    "DeepseekV2Attention",
    "DeepseekV3Attention",
    "Glm4MoeLiteAttention",
    "KimiLinearAttention",
    "LongcatFlashMLA",
    "MiniCPM3Attention",
    "Mistral4Attention",
    "YoutuAttention",
)

MIXERS = dict.fromkeys(CLASSES, latent_attention)
