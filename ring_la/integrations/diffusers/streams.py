"""Image, text and both as sequences that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...context import ContextParallel, GridLayout, ShardedLayout, UnevenLayout
from ...errors import ArgumentError

LAYOUTS = 64
"""As many are kept: every prompt that is masked may bring one."""


class Layouts:
    """The layouts of a model's calls so far, by each rank's number of tokens. A new one is collective."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp = cp
        self._kept: dict[tuple, ShardedLayout] = {}

    def of(self, counts: tuple[int, ...]) -> ShardedLayout:
        """One made before, or a new one in place of the oldest; the same on all ranks."""
        return self.made(counts, lambda: UnevenLayout(self.cp, counts))

    def grid(self, shape: tuple[int, ...]) -> GridLayout:
        """The same for a grid of tokens."""
        return self.made(("grid", shape), lambda: self.cp.grid(shape))

    def made(self, key: tuple, make: Callable[[], ShardedLayout]) -> Any:
        """What `make` gives, kept under `key`."""
        if key not in self._kept:
            if len(self._kept) == LAYOUTS:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make()
        return self._kept[key]


def bounds(tokens: int, rank: int, ranks: int, unit: int = 1) -> tuple[int, int]:
    """A rank's first token and the one behind its last, of an even split in order, by whole units of tokens."""
    whole = tokens // unit
    each, more = whole // ranks, whole % ranks  # not divmod, which a compiler does not follow
    start = rank * each + min(rank, more)
    return unit * start, unit * (start + each + (1 if rank < more else 0))


def counts(sizes: Sequence[int], ranks: int, units: Sequence[int]) -> tuple[int, ...]:
    """Each rank's tokens of streams that are split one by one: of the first, then of the second."""
    each = [
        [stop - start for start, stop in (bounds(n, r, ranks, u) for r in range(ranks))] for n, u in zip(sizes, units)
    ]
    return tuple(sum(n) for n in zip(*each))


def owners(sizes: Sequence[int], ranks: int, units: Sequence[int]) -> Tensor:
    """The rank of each token where whole streams stand one after the other, int64 on the CPU."""
    every = torch.arange(ranks, device="cpu")
    return torch.cat(
        [every.repeat_interleave(torch.tensor(counts([n], ranks, [u]), device="cpu")) for n, u in zip(sizes, units)]
    )


class Streams:
    """How the tokens of one call are split: each stream evenly, in order. Numbers alone, so that a compiler follows.

    Attributes:
        sizes: whole numbers of tokens by stream; empty before the first block.
        shapes: of each stream a tensor of nothing whose second dimension is that number. A compiler takes a number that
            it reaches by a global name for a constant, and compiles anew for each, but not a dimension.
        unit: the image's tokens that stay together, a slice of its grid.
        ahead: streams that a module before the blocks has cut, so that no block gets them whole.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.unit = rank, ranks, 1
        self.sizes: dict[str, int] = {}
        self.shapes: dict[str, Tensor] = {}
        self.ahead: set[str] = set()

    def note(self, sizes: Mapping[str, int]) -> None:
        """So many tokens there are of some streams."""
        self.sizes |= sizes
        self.shapes |= {stream: torch.empty(0, n, device="cpu") for stream, n in sizes.items()}

    def whole(self, streams: Sequence[str]) -> list[int]:
        """The numbers of tokens of `streams`, as an operator takes them."""
        if torch.compiler.is_compiling():
            return [self.shapes[s].shape[1] for s in streams]
        return [self.sizes[s] for s in streams]

    def units(self, streams: Sequence[str]) -> list[int]:
        """The tokens that stay together, of each of `streams`."""
        return [self.unit if s == "image" else 1 for s in streams]

    def counts(self, streams: Sequence[str]) -> tuple[int, ...]:
        """Each rank's tokens of `streams`."""
        return counts([self.sizes[s] for s in streams], self.ranks, self.units(streams))

    def local(self, stream: str) -> int:
        """This rank's number of tokens."""
        start, stop = bounds(self.sizes[stream], self.rank, self.ranks, *self.units([stream]))
        return stop - start

    def shard(self, name: str, x: Tensor, streams: tuple[str, ...], dim: int) -> Tensor:
        """This rank's tokens of a whole `x`; what has this rank's tokens alone stays, and so do the parts of streams
        that were cut ahead.

        Args:
            name: the argument that `x` is, for the error of another length.
        """
        sizes, local = [self.sizes[s] for s in streams], [self.local(s) for s in streams]
        beside = [mine if s in self.ahead else n for s, n, mine in zip(streams, sizes, local)]
        got, whole = x.shape[dim] if x.dim() > dim else None, sum(sizes)
        if got == sum(local):
            return x
        if got not in (whole, sum(beside)):
            tokens = " and ".join(streams)
            expected = f"{whole} tokens of {tokens} in dimension {dim}, or this rank's {sum(local)}"
            raise ArgumentError(name, expected, list(x.shape))
        came = sizes if got == whole else beside
        parts = []
        for part, n, stream in zip(x.split(came, dim), came, streams):
            if n == self.sizes[stream]:
                start, stop = bounds(n, self.rank, self.ranks, *self.units([stream]))
                part = part.narrow(dim, start, stop - start)
            parts.append(part)
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
