"""RWKV-6's bonus, what a token reads of its own write: ``o + scale · (Σ r ⊙ u ⊙ k) v``: one pass each way on CUDA,
PyTorch's own operations elsewhere.

A compiler fuses PyTorch's operations as well, so what traces a call sees those, and there is no operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...autograd import bare, first_derivative_only, traced
from .operator import kernels_of


def bonus(o: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float) -> Tensor:
    """``o + scale · (Σ r ⊙ u ⊙ k) v`` in o's dtype, computed in fp32 or wider.

    Args:
        o, v: ``[B, T, H, V]``. r, k: ``[B, T, Hk, K]``, H a multiple of Hk. u: ``[H, K]``.
    """
    if traced(o) or kernels_of("bonus", o, r, k, v, u) is None:
        return plain_bonus(o, r, k, v, u, scale)
    from .bonus_kernel import forward

    return forward(o, r, k, v, u, scale) if bare(o, r, k, v, u) else _Bonus.apply(o, r, k, v, u, scale)


def plain_bonus(o: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float) -> Tensor:
    wide, repeat = torch.promote_types(o.dtype, torch.float32), v.shape[2] // k.shape[2]
    r, k = (x.to(wide) if repeat == 1 else x.to(wide).repeat_interleave(repeat, 2) for x in (r, k))
    own = (r * k * u.to(wide)).sum(-1, keepdim=True)
    return (o + scale * own * v).to(o.dtype)


class _Bonus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float) -> Tensor:
        from .bonus_kernel import forward

        ctx.save_for_backward(r, k, v, u)
        ctx.scale, ctx.dtype = scale, o.dtype
        return forward(o, r, k, v, u, scale)

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        from .bonus_kernel import backward

        r, k, v, u = ctx.saved_tensors
        return do.to(ctx.dtype), *backward(do, r, k, v, u, ctx.scale), None
