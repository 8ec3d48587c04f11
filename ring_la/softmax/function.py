"""The autograd Function of every call: forward and backward of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import bare, first_derivative_only
from . import core
from .core import Plan, Saved, Tensors


def attention(plan: Plan, x: Tensors) -> tuple[Tensor, Tensor]:
    """o and lse of this rank's queries."""
    if bare(*x):
        return core.forward(plan, x)[:2]
    return _Attention.apply(plan, *x)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, *tensors: Tensor | None):
        o, lse, saved = core.forward(plan, Tensors(*tensors))
        ctx.plan = plan
        ctx.save_for_backward(*saved.tensors, saved.o, saved.lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):
        *tensors, o, lse = ctx.saved_tensors
        return None, *core.backward(ctx.plan, Saved(Tensors(*tensors), o, lse), do, dlse)
