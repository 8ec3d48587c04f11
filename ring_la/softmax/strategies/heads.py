"""Ulysses (DeepSpeed, arXiv 2309.14509): tokens for heads by one all-to-all, and back.

Query heads are split as evenly as they go, together with the key heads they read; with fewer key heads than ranks a key
head goes to several ranks and its gradients are added up. Where query heads do not fall evenly on the key heads of a
rank, key heads are repeated for them there. A rank may own no head. On the GPUs of one host ranks write into each
other's memory (`head_rooms`); else, and where gradients of a key head come from several ranks, messages are sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ...comm import Group, Pending
from .head_rooms import MOST, Landing, Rooms, Shape, Write, stretches


class HeadSplit:
    """Which heads each of `ranks` ranks computes.

    Attributes:
        queries, keys: bounds ``[a, b)`` of each rank's query and key heads.
    """

    def __init__(self, heads: int, groups: int, ranks: int) -> None:
        self.heads, self.groups = heads, groups
        ratio = heads // groups
        if groups >= ranks:
            cuts = [ratio * (r * groups // ranks) for r in range(ranks + 1)]
        else:
            cuts = [r * heads // ranks for r in range(ranks + 1)]
        self.queries = list(zip(cuts, cuts[1:]))
        self.keys = [(a // ratio, -(-b // ratio)) if b > a else (0, 0) for a, b in self.queries]

    def reads(self, rank: int) -> list[int]:
        """The key head, among those of `rank`, that each of its query heads reads."""
        (a, b), first = self.queries[rank], self.keys[rank][0]
        return [h * self.groups // self.heads - first for h in range(a, b)]

    def even(self, rank: int) -> bool:
        """Whether the key heads of `rank` are read by equally many of its query heads, in order."""
        reads, n = self.reads(rank), self.keys[rank][1] - self.keys[rank][0]
        return not reads or (reads == [i * n // len(reads) for i in range(len(reads))] and len(reads) % n == 0)


class Heads:
    """The exchange of tokens for heads among the ranks of a group, and back.

    Args:
        group: the ranks.
        split: who computes which heads.
        tokens: for "q" and for "k" the number of rows of each rank.
        order: for "q" and for "k" the row each row comes from after the exchange; None: as they come.
    """

    def __init__(
        self, group: Group, split: HeadSplit, tokens: Mapping[str, Sequence[int]], order: Mapping[str, Tensor | None]
    ) -> None:
        self.group, self.split, self.tokens, self.order = group, split, tokens, order
        self.bounds = {"q": split.queries, "k": split.keys}
        self._known: dict[Hashable, Rooms] = {}

    @cached_property
    def query_heads(self) -> slice:
        """This rank's query heads."""
        return slice(*self.split.queries[self.group.rank])

    @cached_property
    def key_heads(self) -> slice:
        """This rank's key heads."""
        return slice(*self.split.keys[self.group.rank])

    def query_numbers(self, device: torch.device) -> Tensor:
        """The numbers of this rank's query heads in the whole model."""
        return torch.arange(*self.split.queries[self.group.rank], device=device)

    def local_shape(self, x: Tensor) -> tuple[int, int, int, int]:
        """The shape of all heads of this rank's queries, for ``x [B, tokens of all ranks, heads of this rank, D]``."""
        return x.shape[0], self.tokens["q"][self.group.rank], self.split.heads, x.shape[3]

    @cached_property
    def _repeats(self) -> list[int] | None:
        """The key head each query head reads, where query heads do not fall evenly on the key heads of this rank."""
        me = self.group.rank
        return None if self.split.even(me) else self.split.reads(me)

    def repeat(self, x: Tensor) -> Tensor:
        """Key heads of this rank ``[B, T, heads, D]`` as its kernel takes them: repeated, if unevenly read."""
        if self._repeats is None:
            return x
        return x.index_select(2, torch.tensor(self._repeats, device=x.device))

    def fold(self, grad: Tensor) -> Tensor:
        """The gradient of what `repeat` was given from that of what it gave."""
        if self._repeats is None:
            return grad
        a, b = self.split.keys[self.group.rank]
        out = grad.new_zeros(*grad.shape[:2], b - a, grad.shape[3])
        return out.index_add_(2, torch.tensor(self._repeats, device=grad.device), grad)

    def among_queries(self, x: Tensor) -> Tensor:
        """This rank's query heads ``[heads, …]`` among all of them, the others zero."""
        out = x.new_zeros(self.split.heads, *x.shape[1:])
        out[self.query_heads] = x
        return out

    def among_all(self, x: Tensor) -> Tensor:
        """This rank's key heads among all of them, the others zero."""
        out = x.new_zeros(*x.shape[:2], self.split.groups, x.shape[3])
        out[:, :, self.key_heads] = x
        return out

    @cached_property
    def _spans(self) -> dict[str, list[list[Landing]]]:
        """For "q" and for "k", where each rank's rows stand after the exchange."""
        return {side: stretches(self.tokens[side], self.order[side]) for side in ("q", "k")}

    @cached_property
    def _rooms(self) -> bool:
        """Whether ranks write into each other's memory. The same on all ranks."""
        return self.group.copies and all(len(x) <= MOST for ranks in self._spans.values() for x in ranks)

    @cached_property
    def _apart(self) -> bool:
        """Whether every key head is of one rank."""
        owned = [(a, b) for a, b in self.split.keys if b > a]
        return all(x[1] <= y[0] for x, y in pairwise(owned))

    def to_heads(self, **tensors: tuple[str, Tensor]) -> Pending:
        """Post tensors ``[B, T_local, heads, D]``, each with its side ("q" or "k"), those of one dtype in one message.

        The result is a dict of ``[B, tokens of all ranks, heads of this rank, D]``.
        """
        if self._rooms:
            return self._write_heads(tensors)
        if len(dtypes := dict.fromkeys(x.dtype for _, x in tensors.values())) > 1:
            return _together(self.to_heads(**_of(tensors, dtype)) for dtype in dtypes)
        me, ranks = self.group.rank, range(self.group.size)
        parts = [
            torch.cat([x[:, :, slice(*self.bounds[side][r])].reshape(-1) for side, x in tensors.values()])
            for r in ranks
        ]
        shapes = [[self._shape(side, x, me, self.tokens[side][r]) for side, x in tensors.values()] for r in ranks]
        came_in = self._post(parts, shapes)

        def join() -> dict[str, Tensor]:
            out = {}
            for (name, (side, _)), came in zip(tensors.items(), zip(*came_in.wait())):
                x, order = torch.cat(came, 1), self.order[side]
                out[name] = x if order is None else x.index_select(1, order)
            return out

        return Pending(join)

    def to_tokens(self, **tensors: tuple[str, Tensor]) -> Pending:
        """Post tensors ``[B, tokens of all ranks, heads of this rank, D]`` back; heads sent to several ranks add up."""
        if self._rooms and (self._apart or all(side == "q" for side, _ in tensors.values())):
            return self._write_tokens(tensors)
        if len(dtypes := dict.fromkeys(x.dtype for _, x in tensors.values())) > 1:
            return _together(self.to_tokens(**_of(tensors, dtype)) for dtype in dtypes)
        me, ranks = self.group.rank, range(self.group.size)
        split = {name: self._by_rank(side, x) for name, (side, x) in tensors.items()}
        parts = [torch.cat([split[name][r].reshape(-1) for name in tensors]) for r in ranks]
        shapes = [[self._shape(side, x, r, self.tokens[side][me]) for side, x in tensors.values()] for r in ranks]
        came_in = self._post(parts, shapes)

        def join() -> dict[str, Tensor]:
            out = {}
            for (name, (side, x)), came in zip(tensors.items(), zip(*came_in.wait())):
                whole = x.new_zeros(x.shape[0], self.tokens[side][me], self._heads[side], x.shape[3])
                for bounds, part in zip(self.bounds[side], came):
                    whole[:, :, slice(*bounds)] += part
                out[name] = whole
            return out

        return Pending(join)

    @property
    def _heads(self) -> dict[str, int]:
        """All heads of each side."""
        return {"q": self.split.heads, "k": self.split.groups}

    def _shape(self, side: str, x: Tensor, rank: int, rows: int) -> Shape:
        """Of so many rows of the heads of a rank."""
        a, b = self.bounds[side][rank]
        return x.shape[0], rows, b - a, x.shape[3]

    # -- through memory of all ranks -----------------------------------------------------------------------

    def _write_heads(self, tensors: Mapping[str, tuple[str, Tensor]]) -> Pending:
        """`to_heads`: this rank's rows to where they stand among those of all ranks."""
        me = self.group.rank
        shapes: list[list[Shape]] = []
        writes: list[list[Write]] = []
        for r in range(self.group.size):
            shapes.append([self._shape(side, x, r, sum(self.tokens[side])) for side, x in tensors.values()])
            writes.append([])
            for i, (side, x) in enumerate(tensors.values()):
                of_rank = x[:, :, slice(*self.bounds[side][r])]
                for t in self._spans[side][me]:
                    writes[-1].append(Write(i, t.there, slice(None), of_rank[:, t.here]))
        return self._written(tensors, shapes, writes)

    def _write_tokens(self, tensors: Mapping[str, tuple[str, Tensor]]) -> Pending:
        """`to_tokens`: this rank's heads among all heads of each rank's rows."""
        me = self.group.rank
        shapes: list[list[Shape]] = []
        writes: list[list[Write]] = []
        for r in range(self.group.size):
            shapes.append(
                [(x.shape[0], self.tokens[side][r], self._heads[side], x.shape[3]) for side, x in tensors.values()]
            )
            writes.append([])
            for i, (side, x) in enumerate(tensors.values()):
                heads = slice(*self.bounds[side][me])
                for t in self._spans[side][r]:
                    writes[-1].append(Write(i, t.here, heads, x[:, t.there]))
        return self._written(tensors, shapes, writes)

    def _written(
        self, tensors: Mapping[str, tuple[str, Tensor]], shapes: list[list[Shape]], writes: list[list[Write]]
    ) -> Pending:
        dtypes = [x.dtype for _, x in tensors.values()]
        name = tuple(map(tuple, shapes)), tuple(dtypes)
        if name not in self._known:
            self._known[name] = Rooms(self.group, shapes, dtypes)
        out = self._known[name].exchange(writes)
        return Pending(lambda: dict(zip(tensors, out)))

    # -- by messages ---------------------------------------------------------------------------------------

    def _by_rank(self, side: str, x: Tensor) -> Sequence[Tensor]:
        order = self.order[side]
        back = x if order is None else torch.empty_like(x).index_copy_(1, order, x)
        return back.split(list(self.tokens[side]), 1)

    def _post(self, parts: list[Tensor], shapes: list[list[tuple[int, ...]]]) -> Pending:
        """Send one flat part to each rank; the result holds the tensors of `shapes` that came from each."""
        sizes = [[torch.Size(s).numel() for s in row] for row in shapes]
        pending = self.group.all_to_all_uneven(torch.cat(parts), [len(p) for p in parts], [sum(s) for s in sizes])

        def cut() -> list[list[Tensor]]:
            rows = pending.wait().split([sum(s) for s in sizes])
            return [[x.view(s) for x, s in zip(row.split(n), shape)] for row, n, shape in zip(rows, sizes, shapes)]

        return Pending(cut)


def _of(tensors: Mapping[str, tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, tuple[str, Tensor]]:
    """Those of one dtype."""
    return {name: (side, x) for name, (side, x) in tensors.items() if x.dtype == dtype}


def _together(posted: Iterable[Pending]) -> Pending:
    """Several exchanges as one."""
    every = list(posted)
    return Pending(lambda: {name: x for p in every for name, x in p.wait().items()})
