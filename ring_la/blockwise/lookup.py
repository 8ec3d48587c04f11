"""Both ends of a language model: the rows of an embedding, and the sum of a loss over tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import first_derivative_only, outside_graphs
from ..context import ShardedLayout
from .blocks import fixed
from .sums import OF_TOKENS, exact_sum, largest, part_of, power_above, rounded


def embedding(ids: Tensor, weight: Tensor, *, layout: ShardedLayout | None) -> Tensor:
    """``weight[ids]`` of ``ids [B, T]``; the gradient of ``weight [V, D]`` is summed exactly (see `by_block`)."""
    return _embedding(layout, ids, weight) if fixed(layout) else F.embedding(ids, weight)


def token_sum(x: Tensor, *, layout: ShardedLayout | None) -> Tensor:
    """The sum of ``x [B, T]``; under a deterministic layout the exact one of all ranks' tokens, on the first rank, and
    zero on the others."""
    return _token_sum(layout, x) if fixed(layout) else x.sum()


@outside_graphs
def _embedding(layout: ShardedLayout, ids: Tensor, weight: Tensor) -> Tensor:
    return _Embedding.apply(layout, ids, weight)


@outside_graphs
def _token_sum(layout: ShardedLayout, x: Tensor) -> Tensor:
    return _TokenSum.apply(layout, x)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: ShardedLayout, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.layout, ctx.way_back = layout, layout.cp.comm.agreement.way_back()
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.way_back()
        (ids, weight), layout = ctx.saved_tensors, ctx.layout
        rows = dy.flatten(0, 1)
        whole = torch.zeros(weight.shape, dtype=torch.float64, device=weight.device)
        whole.index_add_(0, ids.flatten(), rounded(rows, power_above(largest(rows, layout)), OF_TOKENS))
        return None, None, part_of(layout.cp.comm.all_reduce(whole).wait(), layout, weight)


class _TokenSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: ShardedLayout, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return part_of(exact_sum(x.flatten(), layout, OF_TOKENS), layout, x.new_empty(()))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad.expand(ctx.shape)
