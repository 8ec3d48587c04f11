"""Where every rank's queries and keys stand, for one way of meeting on a split sequence; made once a layout.

Ranks meet over two axes: `heads` are exchanged for tokens on one, keys and values travel on the other. Either may be
absent: a plain ring has no heads axis, Ulysses no ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..comm import Group
from ..context import ShardedLayout
from ..errors import UnsupportedError
from .tokens import Tokens


@dataclass(frozen=True, eq=False)
class Placement:
    """The axes and the tokens on them.

    Attributes:
        layout, kv_layout: the splits of queries and keys.
        heads: ranks that exchange heads for tokens, or None.
        ring: ranks whose keys this rank's queries must meet, or None.
        holders: for each rank of `ring`, the ranks of the whole group whose tokens it has after the heads' exchange.
    """

    layout: ShardedLayout
    kv_layout: ShardedLayout
    heads: Group | None
    ring: Group | None
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, strategy: str, layout: ShardedLayout, kv_layout: ShardedLayout) -> Placement:
        """How ranks meet under a strategy."""
        cp = layout.cp
        everyone = tuple(range(cp.size))
        if strategy == "ulysses":
            return cls(layout, kv_layout, cp.comm, None, (everyone,))
        if strategy == "usp":
            if cp.grid is None:
                expected = "ring, all_gather or ulysses on a one-dimensional group"
                raise UnsupportedError(
                    "strategy", expected, "'usp'", 'Make the ContextParallel of a DeviceMesh "ulysses" × "ring"'
                )
            return cls(layout, kv_layout, cp.grid.ulysses, cp.grid.ring, cp.grid.holders)
        return cls(layout, kv_layout, None, cp.comm, tuple((r,) for r in everyone))

    @classmethod
    def kept(cls, strategy: str, layout: ShardedLayout, kv_layout: ShardedLayout) -> Placement:
        """`of`, made once a layout."""
        places = layout.__dict__.setdefault("_placements", {})
        key = (strategy, None if kv_layout is layout else kv_layout.key)
        if key not in places:
            places[key] = cls.of(strategy, layout, kv_layout)
        return places[key]

    @cached_property
    def rank(self) -> int:
        """This rank's number on the ring axis."""
        return 0 if self.ring is None else self.ring.rank

    @cached_property
    def _rows(self) -> list[tuple[Tokens, Tensor | None]]:
        other = None if self.kv_layout is self.layout else self.kv_layout
        device = self.layout.cp.device
        return [Tokens.of_ranks(self.layout, ranks, device, other).fewest_runs() for ranks in self.holders]

    @cached_property
    def _keys(self) -> list[tuple[Tokens, Tensor | None]]:
        device = self.layout.cp.device
        if self.kv_layout is self.layout:
            return self._rows
        return [Tokens.of_ranks(self.kv_layout, ranks, device).fewest_runs() for ranks in self.holders]

    @cached_property
    def rows(self) -> tuple[Tokens, ...]:
        """For each rank of the ring axis its queries, in the order it computes in."""
        return tuple(tokens for tokens, _ in self._rows)

    @cached_property
    def keys(self) -> tuple[Tokens, ...]:
        """For each rank of the ring axis its keys, in the order it computes in."""
        return tuple(tokens for tokens, _ in self._keys)

    @property
    def order(self) -> tuple[Tensor | None, Tensor | None]:
        """The row that each of this rank's queries and keys comes from in what its holders sent."""
        return self._rows[self.rank][1], self._keys[self.rank][1]

    @cached_property
    def all_keys(self) -> tuple[Tokens, Tensor | None]:
        """All keys of the ring axis and the row each comes from: in order, unless queries stand at a stride."""
        joined = Tokens.joined(self.keys)
        strided = any(run.stride > 1 for tokens in self.rows for run in tokens.runs)
        return (joined, None) if strided and not self.layout.cp.deterministic else joined.fewest_runs()

    @cached_property
    def whole_rows(self) -> Tokens:
        """All queries of the sequence, in order."""
        return Tokens.joined(self.rows).sorted()[0]

    @cached_property
    def strides(self) -> frozenset[int]:
        """The strides at which queries and keys stand, over all ranks."""
        keys = (self.all_keys[0], *self.keys) if self.layout.cp.deterministic else self.keys
        return frozenset(run.stride for tokens in (*self.rows, *keys) for run in tokens.runs)

    def joint(self, where: str, count: int) -> tuple[Tokens, Tokens, Tokens]:
        """This rank's queries, joint keys, and all queries of the sequence, as they stand to each other."""
        kept = self.__dict__.setdefault("_joint", {})
        if (where, count) not in kept:
            cu, total = self.kv_layout.cu_seqlens, self.kv_layout.seq_len
            rows, whole = self.rows[self.rank], self.whole_rows
            if where == "rear":
                ends = [b - a for a, b in zip(cu, cu[1:])]
                rows, whole = rows.from_ends(ends), whole.from_ends(ends)
            start = -count if where == "front" else 0
            kept[where, count] = rows, Tokens.joint(count, self.layout.cp.device, start, total), whole
        return kept[where, count]
