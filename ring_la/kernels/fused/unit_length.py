"""Rows of unit length, as a recurrence's q and k: ``x · rsqrt(Σ x² + eps)`` over the last dimension.

    ring_la::unit_length   ring_la::unit_length_backward

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations, which have derivatives of
every order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operator import Operator, fused, kernels_of


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x · rsqrt(Σ x² + eps)`` over the last dimension, in fp32 or wider."""
    if not fused(x) or x.dim() != 4:
        return plain_unit_length(x, eps)
    return unit_length(x, eps)


def plain_unit_length(x: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)).to(x.dtype)


def plain_unit_length_backward(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y, g = x.to(wide), dy.to(wide)
    r = torch.rsqrt((y * y).sum(-1, keepdim=True) + eps)
    return (r * (g - y * (r * r) * (y * g).sum(-1, keepdim=True))).to(x.dtype)


def _unit_length(x: Tensor, eps: float) -> Tensor:
    """`l2norm` of ``x [B, T, H, D]``."""
    kernels = kernels_of("unit_length", x)
    return plain_unit_length(x, eps).contiguous() if kernels is None else kernels.forward(x, eps)


def _unit_length_backward(dy: Tensor, x: Tensor, eps: float) -> list[Tensor]:
    kernels = kernels_of("unit_length", x)
    return [plain_unit_length_backward(dy, x, eps).contiguous() if kernels is None else kernels.backward(dy, x, eps)]


def _fake(x, eps):
    return x.new_empty(x.shape)


unit_length = Operator("unit_length", _unit_length, _unit_length_backward, _fake, 1)
