"""The autograd Function of every call: forward and backward of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import bare, first_derivative_only
from .plan import AttentionPlan, Saved
from .tensors import Tensors


def attention(plan: AttentionPlan, x: Tensors) -> tuple[Tensor, Tensor]:
    """o and lse of this rank's queries."""
    if bare(*x):
        return plan.forward(x)[:2]
    return _Attention.apply(plan, *x)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: AttentionPlan, *tensors: Tensor | None):
        o, lse, saved = plan.forward(Tensors(*tensors))
        ctx.plan = plan
        ctx.save_for_backward(*saved.tensors, saved.o, saved.lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):
        *tensors, o, lse = ctx.saved_tensors
        return None, *ctx.plan.backward(Saved(Tensors(*tensors), o, lse), do, dlse)
