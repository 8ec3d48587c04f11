"""Which keys a rank needs of which owners, in which rounds, and where they and their gradients meet; the same on all
ranks, so that no sizes are exchanged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ...comm.memory import Memory
from ..geometry import Pair, Reach, Tile, Tokens, tiles
from .job import AttentionJob
from .views import Addresses, Views

Shapes = tuple[torch.Size, torch.Size, torch.dtype]
"""Of k and v."""
Stretches = list[tuple[int, int]]
"""Rows ``a … b − 1`` of a rank's keys, in order and apart."""

LARGEST = 4
"""Owners whose keys are computed on at once, but where they have few."""
FEW = 0.5
"""Keys that are few, over a rank's own: a rank's own block takes longer than they are under way."""


class KeyRun(NamedTuple):
    """Rows ``start … stop − 1`` of an owner's keys.

    Attributes:
        place: their first row among the keys of a round, or in an inbox.
    """

    owner: int
    start: int
    stop: int
    place: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Round:
    """Keys that a rank computes on at once.

    Attributes:
        number: of the round.
        spans: the keys, one after the other.
        letters: where the gradients of each span go in its owner's inbox.
        keys: where the keys stand.
        owners: as bits.
    """

    number: int
    spans: tuple[KeyRun, ...]
    letters: tuple[KeyRun, ...]
    keys: Tokens
    owners: int


class Schedule:
    """Who needs which keys of whom, in which rounds, and where gradients meet at their owner.

    Args:
        needs: for each rank and owner, the stretches of the owner's keys which that rank's queries see.

    Attributes:
        rows: for each rank and round, how many keys it computes on.
        received: for each rank, rows of its inbox.
        any: whether any rank needs keys of another.
        addresses, views: where rooms stand, and tensors in a memory, found and kept by mailboxes.
    """

    def __init__(self, job: AttentionJob, needs: list[list[Stretches]]) -> None:
        self.size, self._keys = len(needs), job.keys
        self.spans = [self._rounds(rank, of_rank) for rank, of_rank in enumerate(needs)]
        self.rows = [[sum(map(len, spans)) for spans in rounds] for rounds in self.spans]
        self._inboxes = [self._inbox(owner, needs) for owner in range(self.size)]
        self.received = [sum(map(len, letters.values())) for letters in self._inboxes]
        self.any = any(self.received)
        self.addresses: dict[Shapes, Addresses] = {}
        self.views: WeakKeyDictionary[Memory, dict[Shapes, Views]] = WeakKeyDictionary()
        self._own: list[Round] | None = None

    @classmethod
    def of(cls, job: AttentionJob) -> Schedule:
        """The schedule of a job, made once for its rows, keys and mask."""
        return job.against(job.keys[job.rank]).kept(
            cls, lambda: cls(job, needs_of(job.rows, job.keys, job.scores.reach))
        )

    def rounds(self, rank: int) -> list[Round]:
        """A rank's rounds."""
        if self._own is None:
            self._own = [self._round(rank, number, spans) for number, spans in enumerate(self.spans[rank])]
        return self._own

    def letters(self, owner: int) -> list[KeyRun]:
        """The gradients that an owner is sent, by their places in its inbox."""
        return list(self._inboxes[owner].values())

    def _rounds(self, rank: int, needs: list[Stretches]) -> list[list[KeyRun]]:
        """The spans of each round, in the sequence's order."""
        rounds = owners_by_round(rank, needs, len(self._keys[rank]))
        return [self._in_order([(s, a, b) for s in owners for a, b in needs[s]]) for owners in rounds]

    def _in_order(self, stretches: list[tuple[int, int, int]]) -> list[KeyRun]:
        """Stretches of owners' keys in the sequence's order, cut where another owner's keys stand between."""
        out: list[KeyRun] = []
        for _, owner, a, b in sorted(piece for stretch in stretches for piece in self._pieces(*stretch)):
            last = out[-1] if out else KeyRun(-1, 0, 0, 0)
            if (last.owner, last.stop) == (owner, a):
                out[-1] = KeyRun(owner, last.start, b, last.place)
            else:
                out.append(KeyRun(owner, a, b, last.place + len(last)))
        return out

    def _pieces(self, owner: int, a: int, b: int) -> Iterator[tuple[int, int, int, int]]:
        """(place in the sequence, owner, first row, the one behind the last) of what stands together there."""
        runs = self._keys[owner].cut(a, b).runs or ()
        if any(r.stride != 1 for r in runs) or not runs:
            yield runs[0].index if runs else 0, owner, a, b
        else:
            yield from ((r.index, owner, a + r.offset, a + r.offset + r.length) for r in runs)

    def _inbox(self, owner: int, needs: list[list[Stretches]]) -> dict[tuple[int, int], KeyRun]:
        """Where gradients of an owner's keys meet, by sender and first row."""
        out, place = {}, 0
        for rank in range(self.size):
            for a, b in needs[rank][owner] if rank != owner else ():
                out[rank, a] = KeyRun(owner, a, b, place)
                place += b - a
        return out

    def _round(self, rank: int, number: int, spans: list[KeyRun]) -> Round:
        keys = Tokens.joined([self._keys[s.owner].cut(s.start, s.stop) for s in spans])
        letters = tuple(self._letter(rank, s) for s in spans)
        return Round(number, tuple(spans), letters, keys, sum(1 << s for s in {x.owner for x in spans}))

    def _letter(self, rank: int, span: KeyRun) -> KeyRun:
        """Where the gradients of a span go in its owner's inbox."""
        sent = (x for (sender, _), x in self._inboxes[span.owner].items() if sender == rank)
        whole = next(x for x in sent if x.start <= span.start < x.stop)
        return KeyRun(span.owner, span.start, span.stop, whole.place + span.start - whole.start)


def owners_by_round(rank: int, needs: list[Stretches], own: int) -> Iterator[list[int]]:
    """Owners whose keys a rank with `own` keys computes on at once: the nearest to the left, the next two, the next
    four …, and more in a round while their keys are few (windows, documents)."""
    size, doubling = len(needs), 1
    owners = [s for n in range(1, size) if needs[s := (rank - n) % size]]
    while owners:
        keys = list(accumulate(sum(b - a for a, b in needs[s]) for s in owners))
        n = max(doubling, bisect_right(keys, own * FEW))
        yield owners[:n]
        owners, doubling = owners[n:], min(LARGEST, 2 * doubling)


def most_rounds(rows: Sequence[Tokens], keys: Sequence[Tokens], reach: Reach) -> int:
    """Rounds of the rank that has most of them."""
    needs = needs_of(rows, keys, reach)
    return max(len(list(owners_by_round(r, x, len(own)))) for r, (x, own) in enumerate(zip(needs, keys)))


def needs_of(rows: Sequence[Tokens], keys: Sequence[Tokens], reach: Reach) -> list[list[Stretches]]:
    """For each rank and owner, the stretches of the owner's keys which that rank's queries see."""
    return [[_seen(tiles(Pair(own, others, reach))) for others in keys] for own in rows]


def _seen(met: list[Tile]) -> Stretches:
    """The stretches of keys that tiles hold, joined where they touch."""
    out: Stretches = []
    for a, b in sorted((t.k0, t.k1) for t in met):
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(b, out[-1][1])
        else:
            out.append((a, b))
    return out
