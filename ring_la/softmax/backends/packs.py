"""Several tiles as one varlen call: few, large kernel calls also where documents are many and short.

Varlen kernels take rows of several sequences one after the other with their offsets, under one mask, counted from each
one's last row and key. Tiles of the same mask are put together; rows that do not already lie one after the other are
gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Pair, Tile, once, strips, tiles
from ..merging import dense

LARGE = 1 << 23
"""Scores of a tile that is worth a call of its own where its rows would be gathered: with 32 heads of 128 channels it
takes a GPU longer than the host takes for the call (about 0.1 ms)."""


class Window(NamedTuple):
    """A mask as FlashAttention names it: row i of n sees columns from ``i + m − n − left`` to ``i + m − n + right``."""

    causal: bool
    left: int = -1
    right: int = -1

    @classmethod
    def of(cls, t: Tile) -> Window:
        """The mask of a trimmed tile."""
        if t.full or bottom_right(t):
            return cls(not t.full)
        shift = (t.k1 - t.k0) - (t.q1 - t.q0)
        return cls(False, -1 if t.lo is None else shift - t.lo, -1 if t.hi is None else t.hi - shift)


@dataclass(frozen=True)
class Side:
    """The rows of all tiles on one side.

    Attributes:
        rows: a slice where they lie one after the other, else their numbers.
        cu: int32 offsets ``[tiles+1]`` on the device. longest: rows of the longest tile.
    """

    rows: slice | Tensor
    cu: Tensor
    longest: int

    @classmethod
    def of(cls, spans: list[tuple[int, int]], device: torch.device) -> Side:
        """From the first row and the end of each tile."""
        offsets = [0]
        for a, b in spans:
            offsets.append(offsets[-1] + b - a)
        rows = (
            slice(spans[0][0], spans[-1][1])
            if _adjacent(spans)
            else torch.cat([torch.arange(a, b, device="cpu") for a, b in spans]).to(device)
        )
        return cls(rows, torch.tensor(offsets, dtype=torch.int32, device=device), max(b - a for a, b in spans))

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The rows of `x` in the order of the tiles, its last dimension side by side."""
        if isinstance(self.rows, slice):
            return dense(x.narrow(dim, self.rows.start, self.rows.stop - self.rows.start))
        return dense(x.index_select(dim, self.rows))


@dataclass(frozen=True)
class Pack:
    """Tiles of one mask, for one varlen call. No row of queries stands in it twice."""

    window: Window
    q: Side
    k: Side


@once
def packs(pair: Pair) -> tuple[list[Pack], list[Tile]]:
    """(varlen calls, tiles left to single calls) for a block."""
    return _packs(named(pair), pair.reach.left, pair.rows.device)


@once
def named(pair: Pair) -> list[Tile]:
    """The tiles of a block, each with a mask that FlashAttention can name."""
    return [part for t in tiles(pair) for part in _named(t)]


def _named(t: Tile) -> list[Tile]:
    """A tile, cut where it has more rows than keys and a bound.

    FlashAttention counts bounds from the last row and key, takes a bound of as many keys as there are for none, and
    where one side has a bound and the other none, as many keys as there are for that none: of a tall rectangle some
    rows would see keys they must not, or not all they should.
    """
    n, m = t.q1 - t.q0, t.k1 - t.k0
    if t.full or not t.band or n <= m:
        return [t]
    if t.lo is None:  # from some row on, all keys are seen; up to there, the last row stands at the last key
        cut = t.q0 + m - t.hi
        return [t._replace(q1=cut), Tile(cut, t.q1, t.k0, t.k1)]
    return strips(t, m)


def _packs(todo: list[Tile], left: int | None, device: torch.device) -> tuple[list[Pack], list[Tile]]:
    groups: dict[tuple[Window, int], list[Tile]] = {}
    single = [t for t in todo if not t.band]
    for t in (t for t in todo if t.band):
        window, layer = _common(t, left), 0  # tiles of the same rows go into different calls, whose results merge
        while any(o.q0 < t.q1 and t.q0 < o.q1 for o in groups.get((window, layer), ())):
            layer += 1
        groups.setdefault((window, layer), []).append(t)
    out = []
    for (window, _), members in groups.items():
        if not (_adjacent([(t.q0, t.q1) for t in members]) and _adjacent([(t.k0, t.k1) for t in members])):
            single += [t for t in members if _large(t)]
            members = [t for t in members if not _large(t)]
        if len(members) < 2:
            single += members
            continue
        q, k = [(t.q0, t.q1) for t in members], [(t.k0, t.k1) for t in members]
        out.append(Pack(window, Side.of(q, device), Side.of(k, device)))
    return out, single


def _common(t: Tile, left: int | None) -> Window:
    """The mask of a tile, under which others stand too: of a document shorter than the window, that of longer ones."""
    if left is not None and t.lo is None and t.hi == 0 and t.q1 - t.q0 == t.k1 - t.k0:
        return Window(False, left, 0)
    return Window.of(t)


def _large(t: Tile) -> bool:
    return (t.q1 - t.q0) * (t.k1 - t.k0) >= LARGE


def _adjacent(spans: list[tuple[int, int]]) -> bool:
    return all(x[1] == y[0] for x, y in zip(spans, spans[1:]))


def bottom_right(t: Tile) -> bool:
    """Whether a tile is causal with its last row at its last key."""
    return t.lo is None and t.hi == (t.k1 - t.k0) - (t.q1 - t.q0)
