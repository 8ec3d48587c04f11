"""Experts spread over ranks: every token goes to the ranks of the experts it picked and comes back, none is dropped.

Rank r has experts ``starts[r] … starts[r+1] − 1`` of E, cut as ``torch.chunk`` cuts. Assignments are sorted by expert,
so what goes to a rank stands together:

    rows by expert  --all-to-all-->  rows by rank, then expert  --sort-->  grouped products  --back-->  sum of k rows

The ranks' counts of rows are gathered first and read by the host, once a layer: the exchange needs their sizes. The
gradient of an expert's weights is that of all ranks' tokens, whole, on the one rank that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm import Group
from .moe import Places

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows ``[M, D]`` sorted by expert, and how many each of this rank's experts has: their results ``[M, D]``."""


class ExpertRanks:
    """Which of `group`'s ranks has which of so many experts.

    Attributes:
        starts: the first expert of each rank, and their number ``[P+1]``.
    """

    def __init__(self, experts: int, group: Group) -> None:
        size = -(-experts // group.size)
        self.experts, self.group = experts, group
        self.starts = [min(experts, r * size) for r in range(group.size + 1)]

    @property
    def mine(self) -> slice:
        """This rank's experts."""
        return slice(self.starts[self.group.rank], self.starts[self.group.rank + 1])

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """The weighted sum of what each token's experts make of it. Collective, backward too.

        Args:
            x: ``[N, D]``, this rank's tokens, maybe none. chosen: ``[N, k]``, int64. weights: ``[N, k]``.
        """
        places = Places.of(chosen, self.experts)
        counts = self.group.all_gather(places.sizes).wait().view(self.group.size, -1)  # [P, E]
        to = [slice(a, b) for a, b in zip(self.starts, self.starts[1:])]
        send, receive = torch.stack(
            [torch.stack([counts[self.group.rank, s].sum() for s in to]), counts[:, self.mine].sum(1)]
        ).tolist()
        expert = torch.arange(counts[0, self.mine].numel(), device=x.device).repeat(self.group.size)
        order = expert.repeat_interleave(counts[:, self.mine].flatten(), output_size=sum(receive)).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        # rows have no names here: k times the tokens' bytes, each is gone before the next
        there = (self.group, send, receive), (self.group, receive, send)
        y = _Exchange.apply(
            _Ordered.apply(
                compute(
                    _Ordered.apply(_Exchange.apply(places.spread(x), *there[0]), order, inverse),
                    counts[:, self.mine].sum(0),
                ),
                inverse,
                order,
            ),
            *there[1],
        )
        return places.collect(y * places.arrange(weights)[:, None].to(y.dtype))


class _Exchange(torch.autograd.Function):
    """Rows by the rank they go to become rows by the rank they came from; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send: list[int], receive: list[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive, ctx.way_back = group, send, receive, group.agreement.way_back()
        with group.streams.in_order():
            return group.all_to_all_uneven(x.contiguous(), send, receive).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.way_back()
        return _Exchange.apply(grad, ctx.group, ctx.receive, ctx.send), None, None, None


class _Ordered(torch.autograd.Function):
    """Rows in another order; the gradient reads them back, without sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return _Ordered.apply(grad, inverse, order), None, None
