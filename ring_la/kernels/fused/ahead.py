"""What is read of a state before its decay, as a key that reads it behind: ``p e^−g``, of a decay a head.

    ring_la::ahead   ring_la::ahead_backward

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations, which have derivatives of
every order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .operator import Operator, fused, kernels_of


def ahead_of_decay(p: Tensor, g: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """``p e^−g`` in p's dtype, its product in fp32 or wider, and g, of which nothing is below `least`.

    Args:
        p: ``[B, T, H, K]``. g: log-decay ``[B, T, H]``.
    """
    return ahead(p, g, least) if fused(p) else plain_ahead(p, g, least)


def _wide(p: Tensor, g: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(p.dtype, g.dtype), torch.float32)


def plain_ahead(p: Tensor, g: Tensor, least: float) -> tuple[Tensor, Tensor]:
    g = g.clamp(min=least)
    return (p * torch.exp(-g.to(_wide(p, g)))[..., None]).to(p.dtype), g


def plain_ahead_backward(
    da: Tensor | None, dg: Tensor | None, p: Tensor, g: Tensor, least: float
) -> tuple[Tensor, Tensor]:
    """Gradients of p and g."""
    wide = _wide(p, g)
    grown = torch.exp(-g.clamp(min=least).to(wide))[..., None]
    dx = torch.zeros_like(p, dtype=wide) if da is None else da.to(wide) * grown
    found = -(dx * p.to(wide)).sum(-1)
    found = found if dg is None else found + dg.to(wide)
    return dx.to(p.dtype), torch.where(g >= least, found, 0).to(g.dtype)


def _ahead(p: Tensor, g: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """See `ahead_of_decay`."""
    kernels = kernels_of("ahead", p, g)
    if kernels is not None:
        return kernels.forward(p, g, least)
    a, kept = plain_ahead(p, g, least)
    return a.contiguous(), kept.contiguous()


def _ahead_backward(grads: Sequence[Tensor | None], p: Tensor, g: Tensor, least: float) -> list[Tensor]:
    """Gradients of p and g."""
    da, dg = grads
    kernels = kernels_of("ahead", p, g)
    backward = plain_ahead_backward if kernels is None else kernels.backward
    return [d.contiguous() for d in backward(da, dg, p, g, least)]


def _fake(p, g, least):
    return p.new_empty(p.shape), g.new_empty(g.shape)


ahead = Operator("ahead", _ahead, _ahead_backward, _fake, 2)
