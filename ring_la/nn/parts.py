"""The small parts layers are made of: norms, rotary positions, the short convolution of q, k and v."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import AT_ONCE, by_block, by_element, fixed, norm_at_once, over, row_sum
from ..checks import check_above_zero, check_least
from ..context import ShardedLayout
from ..conv import short_conv
from ..errors import ArgumentError
from ..kernels.fused.rms_norm import rms_norm
from .layer import LayerCall, positive, wide


class RMSNorm(nn.Module):
    """``x / rms(x) ⊙ weight`` over the last dimension, computed in fp32 or wider."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        check_least("eps", eps)
        self.weight, self.eps = nn.Parameter(torch.ones(positive("dim", dim))), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


class GatedRMSNorm(nn.Module):
    """``rmsnorm(x) ⊙ act(gate)``; act is "silu" or "sigmoid"."""

    def __init__(self, dim: int, activation: str = "silu", eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps
        self.silu = {"silu": True, "sigmoid": False}[activation]

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, self.weight, gate, silu=self.silu, eps=self.eps)


def _norm(norm: RMSNorm, layout: ShardedLayout, x: Tensor) -> Tensor:
    return norm_at_once(x, norm.weight, None, True, norm.eps, layout)


def _gated(norm: GatedRMSNorm, layout: ShardedLayout, x: Tensor, gate: Tensor) -> Tensor:
    return norm_at_once(x, norm.weight, gate, norm.silu, norm.eps, layout)


AT_ONCE[RMSNorm], AT_ONCE[GatedRMSNorm] = _norm, _gated


class HeadNorm(nn.Module):
    """Group norm with one group a head: ``x [..., H, V]`` to mean 0 and variance 1 in each head, then an affine map."""

    def __init__(self, heads: int, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(heads, dim)), nn.Parameter(torch.zeros(heads, dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(wide(x), x.shape[-1:], eps=self.eps)
        return (y * self.weight + self.bias).to(x.dtype)


def _of_heads(norm: HeadNorm, layout: ShardedLayout, x: Tensor) -> Tensor:
    """All tokens at once."""

    @by_element
    def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, V = wide(x), x.shape[-1]
        y = y - over(row_sum(y) / V, V)
        y = y * over(torch.rsqrt(row_sum(y * y) / V + norm.eps), V)
        return (y * weight + bias).to(x.dtype)

    return by_block(normed, x, layout=layout, shared=(norm.weight, norm.bias))


AT_ONCE[HeadNorm] = _of_heads


class ShortConv(nn.Module):
    """Depthwise causal convolution and SiLU of all channels given at once, so that one message carries them.

    ``weight [D, W]``, initialised as nn.Conv1d does.
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        bound = positive("conv_width", width) ** -0.5
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, tail: Tensor | None, call: LayerCall) -> tuple[Tensor, Tensor | None]:
        """``(o [B, T, D], last inputs of each document [N, D, W−1] or None)``."""
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return short_conv(x, weight, bias, activation="silu", initial_state=tail, **call.keywords)


def check_rotation(rope_base: float | None, channels: int) -> None:
    """Refuse a base that there are no angles of, and heads that `rotate` cannot pair the channels of."""
    if rope_base is not None:
        check_above_zero("rope_base", rope_base)
    if rope_base is not None and channels % 2:
        raise ArgumentError("head_dim", "an even number of channels, or rope_base=None", channels)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 34), halves paired as GPT-NeoX does.

    x ``[B, T, H, D]``, positions int ``[T]`` or ``[B, T]``. Angles are formed in fp64: at position 10⁶ fp32 has
    lost two digits of them.
    """
    return _turned(x, *_angles(x, positions, base))


def _angles(x: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``x [B, T, H, D]``, ``[(B,) T, 1, D/2]``."""
    half, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequency = base ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64)[..., None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = wide(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _both(q: Tensor, k: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
    angles = _angles(q, positions, base)  # of a token's step these are most of it
    return _turned(q, *angles), _turned(k, *angles)


def rotated(q: Tensor, k: Tensor, positions: Tensor, base: float, call: LayerCall) -> tuple[Tensor, Tensor]:
    """`rotate` of both, positions int ``[T]`` or ``[B, T]``."""
    if not fixed(call.layout):
        return _both(q, k, positions, base)
    at = positions.expand(q.shape[0], -1)

    @by_element
    def both(q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return _both(q, k, at, base)

    return call.rows(both, q, k, at)
