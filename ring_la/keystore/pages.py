"""Which tokens of which sequence are in which block of this rank's memory. Plain values, no tensors.

Memory comes in slabs of some blocks, a block has room for `block` tokens of one sequence. A sequence has runs of blocks
(`Extent`), all full but the last. Sequences that begin alike share blocks: a block is counted once for each, and who
adds to a last block that another has added to already gets a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST = 16
"""Blocks of the smallest slab."""


class Extent(NamedTuple):
    """Blocks side by side in one slab."""

    slab: int
    first: int
    size: int


class SlabTokens(NamedTuple):
    """Tokens side by side in one slab, counted from its first."""

    slab: int
    start: int
    stop: int


@dataclass
class Slab:
    """Of each block how many sequences have it, and the tokens that are written in it."""

    shares: list[int]
    used: list[int] = field(default_factory=list)
    reserved: bool = False

    def __post_init__(self) -> None:
        self.used = [0] * len(self.shares)

    def free_run(self, count: int) -> int | None:
        """The first of `count` free blocks side by side."""
        run = 0
        for i, shares in enumerate(self.shares):
            run = 0 if shares else run + 1
            if run == count:
                return i + 1 - count
        return None


class Held:
    """One sequence as this rank has it.

    Attributes:
        length: its tokens, on all ranks. here: those on this rank.
        extents: their blocks. runs: their positions, ascending.
    """

    def __init__(self, pages: Pages, like: Held | None = None) -> None:
        self._pages = pages
        self.length: int = 0 if like is None else like.length
        self.here: int = 0 if like is None else like.here
        self.extents: list[Extent] = [] if like is None else list(like.extents)
        self.runs: list[range] = [] if like is None else list(like.runs)
        pages.share(self.extents)

    def __del__(self) -> None:
        self._pages.release(self.extents)

    def before(self, position: int) -> int:
        """Tokens of this rank that stand before a position."""
        return sum(len(range(run.start, min(run.stop, position), run.step)) for run in self.runs)

    def spans(self, start: int, stop: int) -> list[SlabTokens]:
        """Where this rank's tokens `start` to `stop` are."""
        out, at, block = [], 0, self._pages.block
        for slab, first, count in self.extents:
            a, b = max(start - at, 0), min(stop - at, count * block)
            if a < b:
                out.append(SlabTokens(slab, first * block + a, first * block + b))
            at += count * block
        return out

    def add(self, runs: Sequence[range], length: int) -> list[SlabTokens]:
        """The sequence has `length` tokens more, on this rank those at `runs`; where these go."""
        new, had = sum(map(len, runs)), self.here
        if new:
            self._room(new)
        self.here, self.length = had + new, self.length + length
        for run in runs:
            last = self.runs[-1] if self.runs else None
            if last is not None and run.step == last.step and run.start == last[-1] + last.step:
                self.runs[-1] = range(last.start, run.stop, last.step)
            else:
                self.runs.append(run)
        spans = self.spans(had, self.here)
        for span in spans:
            self._pages.write(span)
        return spans

    def _room(self, new: int) -> None:
        """Blocks for `new` tokens more."""
        pages, inside = self._pages, self.here % self._pages.block
        if inside and pages.taken(self.extents[-1], inside):
            slab, first, count = last = self.extents.pop()
            if count > 1:
                self.extents.append(Extent(slab, first, count - 1))
            [copy] = pages.take(1, None)
            pages.copy(Extent(slab, first + count - 1, 1), copy)
            pages.release([last._replace(first=first + count - 1, size=1)])
            self._put(copy)
        blocks = -(-(self.here + new) // pages.block) - sum(extent.size for extent in self.extents)
        for extent in pages.take(blocks, self.extents[-1] if self.extents else None):
            self._put(extent)

    def _put(self, extent: Extent) -> None:
        last = self.extents[-1] if self.extents else None
        if last is not None and last.slab == extent.slab and last.first + last.size == extent.first:
            self.extents[-1] = last._replace(size=last.size + extent.size)
        else:
            self.extents.append(extent)


class Pages:
    """The blocks of this rank.

    Args:
        block: tokens a block has room for.
        grow, drop: called with a slab's number (and its blocks) when it comes and when it goes.
        copy: called with two runs of blocks of one length; the second becomes like the first.
    """

    def __init__(
        self,
        block: int,
        grow: Callable[[int, int], None],
        drop: Callable[[int], None],
        copy: Callable[[Extent, Extent], None],
    ) -> None:
        self.block, self._grow, self._drop, self._copy = block, grow, drop, copy
        self.slabs: dict[int, Slab] = {}
        self._next = 0

    def reserve(self, blocks: int, stays: bool = True) -> int:
        """A slab of so many blocks; `stays`: also when no sequence is in it."""
        number, self._next = self._next, self._next + 1
        self._grow(number, blocks)
        self.slabs[number] = Slab([0] * blocks, reserved=stays)
        return number

    def take(self, count: int, after: Extent | None) -> list[Extent]:
        """Blocks that were free: those right behind `after`, then others side by side."""
        out = []
        if after is not None and count > 0:
            shares, first = self.slabs[after.slab].shares, after.first + after.size
            behind = 0
            while behind < count and first + behind < len(shares) and not shares[first + behind]:
                behind += 1
            if behind:
                out.append(Extent(after.slab, first, behind))
                count -= behind
        if count > 0:
            out.append(self._side_by_side(count, out))
        self.share(out)
        for slab, first, n in out:
            self.slabs[slab].used[first : first + n] = [0] * n
        return out

    def _side_by_side(self, count: int, but: Sequence[Extent]) -> Extent:
        self.share(but)  # not these
        try:
            for number, slab in self.slabs.items():
                first = slab.free_run(count)
                if first is not None:
                    return Extent(number, first, count)
            return Extent(self.reserve(max(count, LEAST), False), 0, count)
        finally:
            for number, first, n in but:
                self.slabs[number].shares[first : first + n] = [0] * n

    def share(self, extents: Sequence[Extent]) -> None:
        """One sequence more has these blocks."""
        for number, first, count in extents:
            shares = self.slabs[number].shares
            for i in range(first, first + count):
                shares[i] += 1

    def release(self, extents: Sequence[Extent]) -> None:
        """One sequence less has these blocks; slabs that nobody has leave."""
        for number, first, count in extents:
            shares = self.slabs[number].shares
            for i in range(first, first + count):
                shares[i] -= 1
        for number in {extent.slab for extent in extents}:
            slab = self.slabs[number]
            if not slab.reserved and not any(slab.shares):
                del self.slabs[number]
                self._drop(number)

    def taken(self, last: Extent, inside: int) -> bool:
        """Whether another sequence has written behind the first `inside` tokens of the last block."""
        return self.slabs[last.slab].used[last.first + last.size - 1] > inside

    def write(self, span: SlabTokens) -> None:
        """Tokens are written there."""
        used = self.slabs[span.slab].used
        for i in range(span.start // self.block, -(-span.stop // self.block)):
            used[i] = min(self.block, span.stop - i * self.block)

    def copy(self, source: Extent, to: Extent) -> None:
        """What is in some blocks is in others too."""
        self._copy(source, to)
        self.slabs[to.slab].used[to.first] = self.slabs[source.slab].used[source.first]
