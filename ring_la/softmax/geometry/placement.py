"""Where every rank's queries and keys stand: on one device, and for one way of meeting on a split sequence.

On a split sequence ranks meet over two axes: `heads` are exchanged for tokens on one, keys and values travel on the
other. Either may be absent: a plain ring has no heads axis, Ulysses no ring.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm import Group
from ...context import ShardedLayout
from ...errors import UnsupportedError
from ...kept import once, recent
from .tokens import Tokens


class Joint(NamedTuple):
    """Where joint keys stand, and this rank's queries to them."""

    keys: Tokens
    rows: Tokens

    @classmethod
    def of(cls, where: str, count: int, rows: Tokens, ends: Sequence[int] | Tensor, length: int) -> Joint:
        """`count` keys before the first key of each document ("front") or after its last one ("rear").

        Args:
            ends: number of keys of each document. length: of all keys, after which joint ones have their index.
        """
        if where == "front":
            return cls(Tokens.joint(count, rows.device, -count, length), rows)
        return cls(Tokens.joint(count, rows.device, 0, length), rows.from_ends(ends))


@dataclass(frozen=True, eq=False)
class WholePlacement:
    """All queries and keys on one device.

    Attributes:
        rows, keys: one entry each.
        packed: whether there may be several documents.
        ends: number of keys of each document.
        plans: of calls that were checked, what was planned for them.
    """

    rows: tuple[Tokens]
    keys: tuple[Tokens]
    packed: bool
    ends: Sequence[int] | Tensor
    _joint: dict[tuple[str, int], Joint] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict)

    rank, ring, heads = 0, None, None
    repeatable = False

    @staticmethod
    def of(tq: int, tk: int, device: torch.device, cu: Tensor | None) -> WholePlacement:
        """`tq` queries and `tk` keys, or documents packed at offsets `cu`; kept where the host knows these."""
        if cu is None:
            return _known(tq, tk, device, None)
        if cu.device.type == "cpu":
            return _known(tq, tk, device, tuple(cu.tolist()))
        rows = Tokens.packed(tk, cu)
        return WholePlacement((rows,), (rows,), True, cu.diff().to(torch.int64))

    @property
    def known(self) -> bool:
        """Whether the host knows where rows stand."""
        return self.rows[0].runs is not None

    @cached_property
    def strides(self) -> frozenset[int]:
        """The strides at which queries and keys stand."""
        return frozenset(run.stride for tokens in (*self.rows, *self.keys) for run in tokens.runs or ())

    @property
    def length(self) -> int:
        """Number of queries."""
        return len(self.rows[0])

    def joint(self, where: str, count: int) -> Joint:
        """Where `count` joint keys stand."""
        if (where, count) not in self._joint:
            rows, keys = self.rows[0], self.keys[0]
            self._joint[where, count] = Joint.of(where, count, rows, self.ends, len(keys))
        return self._joint[where, count]


@recent(64)  # with the tiles they were cut into
def _known(tq: int, tk: int, device: torch.device, cu: tuple[int, ...] | None) -> WholePlacement:
    keys = Tokens.whole(tk, device, cu)
    rows = keys if tq == tk else Tokens.whole(tq, device, None, tk - tq)
    ends = [tk] if cu is None else [b - a for a, b in zip(cu, cu[1:])]
    return WholePlacement((rows,), (keys,), cu is not None, ends)


@dataclass(frozen=True, eq=False)
class SplitPlacement:
    """The axes of a split sequence and the tokens on them; made once a layout and a way of meeting.

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
    _joint: dict[tuple[str, int], Joint] = field(default_factory=dict)

    known = True

    @classmethod
    def of(cls, strategy: str, layout: ShardedLayout, kv_layout: ShardedLayout) -> SplitPlacement:
        """How ranks meet under a strategy."""
        cp = layout.cp
        everyone = tuple(range(cp.size))
        if strategy == "ulysses":
            return cls(layout, kv_layout, cp.comm, None, (everyone,))
        if strategy == "usp":
            if cp.axes is None:
                expected = "ring, all_gather or ulysses on a one-dimensional group"
                raise UnsupportedError(
                    "strategy", expected, "'usp'", 'Make the ContextParallel of a DeviceMesh "ulysses" × "ring"'
                )
            return cls(layout, kv_layout, cp.axes.ulysses, cp.axes.ring, cp.axes.holders)
        return cls(layout, kv_layout, None, cp.comm, tuple((r,) for r in everyone))

    @cached_property
    def rank(self) -> int:
        """This rank's number on the ring axis."""
        return 0 if self.ring is None else self.ring.rank

    @property
    def packed(self) -> bool:
        """Whether there are several documents."""
        return self.layout.num_documents > 1

    @property
    def repeatable(self) -> bool:
        """Whether gradients must be the same bits in every run."""
        return self.layout.cp.deterministic

    @property
    def length(self) -> int:
        """Number of queries of the whole sequence."""
        return self.layout.seq_len

    @once
    def _rows(self) -> list[tuple[Tokens, Tensor | None]]:
        other = None if self.kv_layout is self.layout else self.kv_layout
        device = self.layout.cp.device
        return [Tokens.of_ranks(self.layout, ranks, device, other).fewest_runs() for ranks in self.holders]

    @once
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

    @once
    def all_keys(self) -> tuple[Tokens, Tensor | None]:
        """All keys of the ring axis and the row each comes from: in order, unless queries stand at a stride."""
        joined = Tokens.joined(self.keys)
        strided = any(run.stride > 1 for tokens in self.rows for run in tokens.runs)
        return (joined, None) if strided and not self.repeatable else joined.fewest_runs()

    @cached_property
    def strides(self) -> frozenset[int]:
        """The strides at which queries and keys stand, over all ranks."""
        keys = (self.all_keys[0], *self.keys) if self.repeatable else self.keys
        return frozenset(run.stride for tokens in (*self.rows, *keys) for run in tokens.runs)

    def joint(self, where: str, count: int) -> Joint:
        """Where `count` joint keys stand."""
        if (where, count) not in self._joint:
            cu, rows = self.kv_layout.cu_seqlens, self.rows[self.rank]
            ends = [b - a for a, b in zip(cu, cu[1:])]
            self._joint[where, count] = Joint.of(where, count, rows, ends, self.kv_layout.seq_len)
        return self._joint[where, count]
