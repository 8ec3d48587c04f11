"""Values every rank has, with gradients: one side of each pair sends in the forward pass, the other in the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from .group import Group


class _SummedBack(torch.autograd.Function):
    """Gradients are summed over the ranks of ``ctx.group``."""

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        ctx.way_back()
        return ctx.group.all_reduce(grad).wait(), None


class SumOverRanks(_SummedBack):
    """A sum over the ranks that every rank gets; gradients flowing into the copies are summed the same way."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.way_back = group, group.agreement.way_back()
        return group.all_reduce(x).wait()


class Replicated(_SummedBack):
    """A value that is the same on all ranks; its gradient is the whole one on every rank."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.way_back = group, group.agreement.way_back()
        return x.view_as(x)
