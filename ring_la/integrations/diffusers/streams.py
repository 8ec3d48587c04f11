"""Image, text and both as sequences that are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...context import ContextParallel, ShardedLayout
from ...errors import ArgumentError
from ...layout import Segment

LAYOUTS = 64
"""As many are kept: every prompt that is masked may bring one."""


class UnevenLayout(ShardedLayout):
    """A contiguous layout with given numbers of tokens for each rank."""

    def __init__(self, cp: ContextParallel, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        super().__init__(cp, sum(counts), "contiguous")

    @property
    def split(self) -> tuple:
        return (*super().split, self.counts)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        out, start = [], 0
        for rank, n in enumerate(self.counts):
            out += [Segment(start, start + n, rank)] if n else []
            start += n
        return tuple(out)


class Layouts:
    """The layouts of a model's calls so far, by each rank's number of tokens. A new one is collective."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp = cp
        self._kept: dict[tuple[int, ...], ShardedLayout] = {}

    def of(self, counts: tuple[int, ...]) -> ShardedLayout:
        """One made before, or a new one in place of the oldest; the same on all ranks."""
        if counts not in self._kept:
            if len(self._kept) == LAYOUTS:
                del self._kept[next(iter(self._kept))]
            self._kept[counts] = UnevenLayout(self.cp, counts)
        return self._kept[counts]


def bounds(tokens: int, rank: int, ranks: int) -> tuple[int, int]:
    """A rank's first token and the one behind its last, of an even split in order."""
    each, more = tokens // ranks, tokens % ranks  # not divmod, which a compiler does not follow
    start = rank * each + min(rank, more)
    return start, start + each + (1 if rank < more else 0)


def counts(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Each rank's tokens of streams that are split one by one: of the first, then of the second."""
    each = [[stop - start for start, stop in (bounds(n, r, ranks) for r in range(ranks))] for n in sizes]
    return tuple(sum(n) for n in zip(*each))


def owners(sizes: Sequence[int], ranks: int) -> Tensor:
    """The rank of each token where whole streams stand one after the other, int64 on the CPU."""
    every = torch.arange(ranks)
    return torch.cat([every.repeat_interleave(torch.tensor(counts([n], ranks))) for n in sizes])


class Streams:
    """How the tokens of one call are split: each stream evenly, in order. Numbers alone, so that a compiler follows.

    Attributes:
        sizes: whole numbers of tokens by stream; empty before the first block.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.sizes: dict[str, int] = {}

    def local(self, stream: str) -> int:
        """This rank's number of tokens."""
        start, stop = bounds(self.sizes[stream], self.rank, self.ranks)
        return stop - start

    def shard(self, name: str, x: Tensor, streams: tuple[str, ...], dim: int) -> Tensor:
        """This rank's tokens of a whole `x`; what has this rank's tokens alone stays.

        Args:
            name: the argument that `x` is, for the error of another length.
        """
        sizes = [self.sizes[s] for s in streams]
        got, whole = x.shape[dim] if x.dim() > dim else None, sum(sizes)
        if got == whole:
            parts = []
            for part, n in zip(x.split(sizes, dim), sizes):
                start, stop = bounds(n, self.rank, self.ranks)
                parts.append(part.narrow(dim, start, stop - start))
            return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        local = sum([self.local(s) for s in streams])
        if got != local:
            tokens = " and ".join(streams)
            expected = f"{whole} tokens of {tokens} in dimension {dim}, or this rank's {local}"
            raise ArgumentError(name, expected, list(x.shape))
        return x
