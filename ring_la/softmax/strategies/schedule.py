"""Which keys a rank needs of which owners, in which rounds, and where their gradients meet; the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..tiles import tiles
from ..tokens import Tokens
from .job import Job

LARGEST = 4
"""Owners whose keys are computed on at once."""


class Span(NamedTuple):
    """Rows ``start … stop − 1`` of an owner's keys."""

    owner: int
    start: int
    stop: int


class Letter(NamedTuple):
    """The gradients that `sender` has for rows ``start … stop − 1`` of an owner's keys.

    Attributes:
        place: their first row in the owner's inbox.
    """

    sender: int
    owner: int
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Round:
    """Keys that are computed on at once: the spans they come from, in order, and where they stand.

    Attributes:
        letters: of each span, its gradients.
    """

    spans: tuple[Span, ...]
    keys: Tokens
    letters: tuple[Letter, ...]


class Schedule:
    """Which keys every rank needs of every other, in which rounds, and where gradients meet at their owner.

    Args:
        needs: for each rank and owner, the stretches of the owner's keys which that rank's queries see.
    """

    def __init__(self, needs: list[list[list[tuple[int, int]]]]) -> None:
        self.size = len(needs)
        self._needs, self._rounds = needs, None
        self._inboxes: list[list[Letter]] = []
        for owner in range(self.size):
            place, letters = 0, []
            for rank in range(self.size):
                for a, b in needs[rank][owner] if rank != owner else ():
                    letters.append(Letter(rank, owner, a, b, place))
                    place += b - a
            self._inboxes.append(letters)
        self.most_received = max(sum(x.stop - x.start for x in letters) for letters in self._inboxes)
        self.any = self.most_received > 0

    @classmethod
    def of(cls, job: Job) -> Schedule:
        """The schedule of a job, made once for its rows, keys and mask."""
        kept = job.rows[job.rank].tiles.setdefault(job.keys[job.rank], {})
        key = ("schedule", job.scores.left, job.scores.right)
        if key not in kept:
            kept[key] = cls([[_seen(tiles(job.scores, rows, keys)) for keys in job.keys] for rows in job.rows])
        return kept[key]

    def inbox(self, rank: int) -> list[Letter]:
        """What a rank is sent."""
        return self._inboxes[rank]

    def rounds(self, job: Job) -> list[Round]:
        """This rank's rounds: the nearest owner to the left, the next two, the next four …"""
        if self._rounds is None:
            owners = [(job.rank - n) % self.size for n in range(1, self.size)]
            owners = [s for s in owners if self._needs[job.rank][s]]
            groups, n = [], 1
            while owners:
                groups.append(owners[:n])
                owners, n = owners[n:], min(LARGEST, 2 * n)
            self._rounds = [self._round(job, group) for group in groups]
        return self._rounds

    def _round(self, job: Job, owners: list[int]) -> Round:
        spans = [Span(s, a, b) for s in owners for a, b in self._needs[job.rank][s]]
        cuts = {span: job.keys[span.owner].cut(span.start, span.stop) for span in spans}
        spans.sort(key=lambda span: cuts[span].runs[0].index if cuts[span].runs else 0)
        letters = {tuple(x[1:4]): x for s in owners for x in self._inboxes[s] if x.sender == job.rank}
        keys = Tokens.joined([cuts[span] for span in spans])
        return Round(tuple(spans), keys, tuple(letters[span] for span in spans))


def _seen(met: list) -> list[tuple[int, int]]:
    """The stretches of keys that tiles hold, joined where they touch."""
    out: list[tuple[int, int]] = []
    for a, b in sorted((t.k0, t.k1) for t in met):
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(b, out[-1][1])
        else:
            out.append((a, b))
    return out
