"""Mamba-2's time step for a recurrence whose kernels multiply by it (see `kernels.strength`): Δ, Δ A, and D, a number a
head, at every token.

On CUDA by Triton where it can, one pass each way that leaves all sums over tokens; elsewhere PyTorch's own operations,
which have derivatives of every order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...autograd import first_derivative_only
from .operator import kernels_of


def steps(
    dt: Tensor, A: Tensor, bias: Tensor | None = None, D: Tensor | None = None, *, softplus: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Δ and ``Δ A`` ``[B, T, H]``, in fp32 or wider, and D expanded to that.

    Args:
        dt: ``[B, T, H]``; Δ = dt + bias, through a softplus if asked for. A, bias, D: ``[H]``.
    """
    if kernels_of("steps", dt) is None:
        return _plain(dt, A, bias, D, softplus)
    step, g, *skip = _Steps.apply(dt, A, bias, D, softplus)
    return step, g, skip[0] if skip else None


def _plain(
    dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor | None, softplus: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    wide = torch.promote_types(dt.dtype, torch.float32)
    step = dt.to(wide) if bias is None else dt.to(wide) + bias.to(wide)
    step = F.softplus(step) if softplus else step
    return step, step * A.to(wide), None if D is None else D.to(wide).expand_as(step)


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor | None, softplus: bool):
        from .steps_kernel import forward

        ctx.save_for_backward(dt, A, bias, D)
        ctx.softplus = softplus
        step, g = forward(dt, A, bias, softplus)
        return (step, g) if D is None else (step, g, D.to(g.dtype).expand_as(g))

    @staticmethod
    @first_derivative_only
    def backward(ctx, dstep: Tensor, dg: Tensor, dskip: Tensor | None = None):
        from .steps_kernel import backward

        dt, A, bias, D = ctx.saved_tensors
        ddt, sums = backward(dstep, dg, dskip, dt, A, bias, ctx.softplus)
        dA, dbias, dD = (None if t is None else s.to(t.dtype) for s, t in zip(sums, (A, bias, D)))
        return ddt, dA, dbias, dD, None
