"""Layouts with given numbers of tokens for each rank, and grids of tokens that are split by whole rows or frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..layout import Segment
from .halo import Arrived, Halo, check_width
from .handle import found
from .operator import SplitOperator
from .ranks import ContextRanks
from .sharded import ShardedLayout


def even_counts(n: int, ranks: int) -> tuple[int, ...]:
    """`n` split as evenly as can be, in order: the first ranks have one more."""
    each, more = divmod(n, ranks)
    return tuple(each + (r < more) for r in range(ranks))


class UnevenLayout(ShardedLayout):
    """A contiguous layout with given numbers of tokens for each rank."""

    def __init__(self, cp: ContextRanks, counts: Sequence[int]) -> None:
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


class GridLayout(UnevenLayout):
    """A grid of tokens in row-major order, split by whole slices of its first axis: an image's rows, a video's frames.

    A layout of its tokens like any other, contiguous. Made by `ContextParallel.grid`.

    Attributes:
        shape: the whole grid's.
        slices: the layout of the slices themselves (`counts` of them a rank): what is split along the first axis alone.
    """

    def __init__(self, cp: ContextRanks, shape: Sequence[int], counts: Sequence[int] | None = None) -> None:
        try:
            self.shape = _sizes("shape", shape, 1)
            given = _counts(counts, self.shape[0], cp.size)
        except ArgumentError as error:
            cp.agree_on_layout(error)
            raise
        self.slices = UnevenLayout(cp, given)
        super().__init__(cp, [n * math.prod(self.shape[1:]) for n in given])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part of the grid."""
        return (self.slices.local_length, *self.shape[1:])

    def halo(self, x: Tensor, dim: int, width: int | tuple[int, int] = 1) -> Halo | Arrived:
        """Post the exchange of slices next to this rank's; ``wait()`` gives them. Differentiable.

        Ranks talk to those whose slices they want, neighbours where these hold enough. What runs before ``wait()`` runs
        while messages travel; so it does backwards. Within a compiled graph both are one node: nothing runs meanwhile.

        Args:
            x: this rank's slices along `dim`, of any shape besides.
            width: slices wanted on each side, or (before, after).
        """
        if torch.compiler.is_compiling():
            return Arrived(*_operator(x, self.number, dim, *check_width(width)))
        self.slices._agree_on_tokens("halo", x, dim, ("width", width), check=partial(check_width, width))
        wide = check_width(width)
        route = self.slices.route(("halo", wide), lambda: self._wanted(wide), neighbours=True)
        return Halo(x, dim, wide, route)

    def _wanted(self, width: tuple[int, int]) -> list[Tensor]:
        """Slices before and after those of each rank, -1 beyond the grid."""
        wants, start = [], 0
        for n in self.slices.counts:
            stop = start + n
            rows = [*range(start - width[0], start), *range(stop, stop + width[1])] if n else [-1] * sum(width)
            wants.append(
                torch.tensor([t if 0 <= t < self.shape[0] else -1 for t in rows], dtype=torch.int64, device="cpu")
            )
            start = stop
        return wants

    def beyond(self, width: int | tuple[int, int] = 1) -> tuple[int, int]:
        """How many of the slices `halo` brings before and after this rank's are beyond the grid (zeros)."""
        before, after = check_width(width)
        start = sum(self.slices.counts[: self.rank])
        left = self.shape[0] - start - self.slices.local_length
        return max(0, before - start), max(0, after - left)


def _run(x: Tensor, grid: int, dim: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    """`grid`: its number."""
    return found(grid).halo(x, dim, (before, after)).wait()


def _fake(x: Tensor, grid: int, dim: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    shapes = [[*x.shape], [*x.shape]]
    for shape, width in zip(shapes, (before, after)):
        shape[dim] = width
    return x.new_empty(shapes[0]), x.new_empty(shapes[1])


_operator = SplitOperator("split_halo", _run, _fake, 1)


def _counts(given: Sequence[int] | None, slices: int, ranks: int) -> tuple[int, ...]:
    """The slices of each rank."""
    if given is None:
        return even_counts(slices, ranks)
    counts = _sizes("counts", given, 0)
    if len(counts) != ranks or sum(counts) != slices:
        raise ArgumentError("counts", f"{ranks} numbers whose sum is {slices}", list(counts))
    return counts


def _sizes(name: str, given: Sequence[int], least: int) -> tuple[int, ...]:
    if not isinstance(given, (tuple, list, torch.Size)) or not given:
        raise ArgumentError(name, "a sequence of ints", repr(given))
    for n in given:
        if not isinstance(n, int) or isinstance(n, bool) or n < least:
            raise ArgumentError(name, f"ints >= {least}", list(given))
    return tuple(given)
