"""Experts spread over ranks: every token goes to the ranks of the experts it picked and comes back, none is dropped.

Rank r has experts ``starts[r] … starts[r+1] − 1`` of E, cut as ``torch.chunk`` cuts. A token goes once to each rank
that has experts of it, with its choice and its weights, and from there comes the weighted sum of theirs:

    tokens  --all-to-all-->  rows by rank  --by expert-->  grouped products  --sum-->  rows  --back-->  sum over ranks

So at most P rows of a token travel, not k. The ranks' counts are gathered first and read by the host, once a layer:
the exchange needs their sizes. The gradient of an expert's weights is that of all ranks' tokens, whole, on the one rank
that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import first_derivative_only
from ..checks import is_floats
from ..comm import Entry, Group
from ..errors import ArgumentError, Facts, describe_tensor
from ..kernels.fused.bags import bag_gradients, bag_sums

Known = dict[tuple, Entry]
"""What ranks have compared before, and what the group's log takes for it."""
Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows ``[M, D]`` sorted by expert, and how many each of this rank's experts has: their results ``[M, D]``."""


class ExpertRanks:
    """Which of `group`'s ranks has which of so many experts.

    Attributes:
        starts: the first expert of each rank, and their number ``[P+1]``.
    """

    def __init__(self, experts: int, group: Group) -> None:
        size = -(-experts // group.size)
        self.experts, self.group, self._known = experts, group, Known()
        self.starts = [min(experts, r * size) for r in range(group.size + 1)]

    @property
    def mine(self) -> slice:
        """This rank's experts."""
        return slice(self.starts[self.group.rank], self.starts[self.group.rank + 1])

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """The weighted sum of what each token's experts make of it. Collective, backward too.

        Args:
            x: ``[N, D]``, this rank's tokens, maybe none. chosen: ``[N, k]``, int64. weights: ``[N, k]``.

        Raises:
            ArgumentError: by name, on every rank; experts that there are not on CPUs alone. DisagreementError.
        """
        if not torch.compiler.is_compiling():
            self._agree(x, chosen, weights)
        P, me, k = self.group.size, self.group.rank, chosen.shape[1]
        rank = chosen // max(1, self.starts[1])
        meets = torch.zeros(len(x), P, dtype=torch.bool, device=x.device).scatter_(1, rank, True)
        sizes = torch.zeros(self.experts, dtype=torch.int64, device=x.device)
        sizes.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        counts = self.group.all_gather(torch.cat([sizes, meets.sum(0)])).wait().view(P, -1)  # [P, E + P]
        mine, rows = counts[:, self.mine].sum(0), counts[:, self.experts :]
        send, receive, [held, *_] = torch.stack([rows[me], rows[:, me], mine.sum().expand(P)]).tolist()
        there, back = (self.group, send, receive), (self.group, receive, send)

        at_home = meets.T.flatten()
        place = torch.where(at_home, at_home.cumsum(0) - 1, sum(send)).view(P, -1).T
        sent = Bags.of(place, sum(send))
        expert = _Exchange.apply(chosen.index_select(0, sent.row), *there) - self.starts[me]
        expert = expert.where((expert >= 0) & (expert < len(mine)), len(mine))
        order = expert.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        met = Bags.of(place.view(-1, k), held)
        weight = _Exchange.apply(sent.spread(weights), *there).flatten().index_select(0, order[:held])
        # rows have no names here: k times the tokens' bytes, each is gone before the next
        y = compute(met.spread(_Exchange.apply(sent.spread(x), *there)), mine)
        return sent.collect(_Exchange.apply(met.collect(y, weight), *back))

    def _agree(self, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
        """Refuse, on every rank, what does not fit; ranks compare what they bring before anything is sent."""
        facts, error, agreement = None, None, self.group.agreement
        try:
            facts = self._facts(x, chosen, weights)
        except ArgumentError as e:
            error = e
        if facts is not None and facts in self._known:
            agreement.again(self._known[facts])
            return
        said = f"refused: {error}" if facts is None else dict(facts)
        entry = agreement.agree("what experts on several ranks are given", said)
        if error is not None:
            raise error
        assert facts is not None
        self._known[facts] = entry

    def _facts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[tuple[str, object], ...]:
        """What must be the same on all ranks, by name."""
        if not is_floats(x, 2):
            raise ArgumentError("x", "a float tensor [N, D]", describe_tensor(x))
        whole = isinstance(chosen, Tensor) and chosen.dtype == torch.int64 and chosen.dim() == 2
        if not whole or len(chosen) != len(x) or not chosen.shape[1]:
            raise ArgumentError("chosen", f"int64 [N, k] of N = {len(x)}, k ≥ 1", describe_tensor(chosen))
        if not is_floats(weights) or weights.shape != chosen.shape:
            raise ArgumentError("weights", f"floats [N, k] = {list(chosen.shape)}", describe_tensor(weights))
        if chosen.numel() and chosen.device.type == "cpu":
            low, high = (int(n) for n in chosen.aminmax())
            if low < 0 or high >= self.experts:
                raise ArgumentError("chosen", f"experts from 0 to {self.experts - 1}", f"{low} to {high}")
        facts = [(name, Facts.of(t, 0)) for name, t in (("x", x), ("weights", weights))]
        return (("experts", self.experts), *facts, ("gradients", torch.is_grad_enabled()))


class Bags(NamedTuple):
    """Which of M entries belong to each of R rows: any number of them, each to one row."""

    row: Tensor  # [M], the row of each entry
    entries: Tensor  # [M], the entries by row
    starts: Tensor  # [R + 1], where those of each row stand in it

    @classmethod
    def of(cls, place: Tensor, entries: int) -> Bags:
        """Of the entries of each row, ``place [R, n]``; what is `entries` or more is none."""
        there = place < entries
        slots = (~there).flatten().to(torch.uint8).argsort(stable=True)[:entries]
        by_row = place.flatten().index_select(0, slots)
        row = torch.empty_like(by_row).scatter_(0, by_row, slots // max(1, place.shape[1]))
        return cls(row, by_row, F.pad(there.sum(1).cumsum(0), (1, 0)))

    def spread(self, x: Tensor) -> Tensor:
        """Rows ``[R, D]`` as their entries ``[M, D]``."""
        return _SpreadRows.apply(x, *self)

    def collect(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The sum of each row's entries of ``y [M, D]``, weighed by ``weight [M]`` or not: ``[R, D]``."""
        return _CollectRows.apply(y, *self) if weight is None else _WeighRows.apply(y, weight, *self)


# The first two are each other's derivative. All only read at indices, as their siblings in moe.py.


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, entries: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(row, entries, starts)
        return x.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _CollectRows.apply(grad, *ctx.saved_tensors), None, None, None


class _CollectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, row: Tensor, entries: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(row, entries, starts)
        return bag_sums(y, None, entries, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _SpreadRows.apply(grad, *ctx.saved_tensors), None, None, None


class _WeighRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, row: Tensor, entries: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight, row)
        return bag_sums(y, weight, entries, starts)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *bag_gradients(grad, *ctx.saved_tensors), None, None, None


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
