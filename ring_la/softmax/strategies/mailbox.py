"""Rooms for others' keys and values in memory that every rank of a host can reach, and an inbox for gradients.

A mailbox holds [a room for each round's keys and values | inbox] in memory as large on every rank, and is kept with the
group. A rank's inbox begins behind its own rooms: in causal order who sees few keys gets many gradients. Each owner
copies its keys into the rooms of those who need them, and says that they are there. A barrier on the device ends each
use: nothing is written for the next one before all have read. Copies run on a stream of high priority beside the
current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..merging import Gradients
from .job import AttentionJob, KeyValues
from .schedule import Round, Schedule
from .views import Addresses, Delivery, Views


class Mailbox:
    """One use of the memory: keys delivered and received, letters.

    Args:
        job: whose ranks and tokens. schedule: who needs what. k, v: this rank's keys and values.
        dtype: of gradients; None: there will be none.
    """

    def __init__(
        self, job: AttentionJob, schedule: Schedule, k: Tensor, v: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        self.job, self.schedule, self.k, self.v, self.dtype = job, schedule, k.contiguous(), v.contiguous(), dtype
        shapes = k.shape, v.shape, k.dtype
        if shapes not in schedule.addresses:
            schedule.addresses[shapes] = _addresses(schedule, self._size, k.element_size())
        self._inboxes, self._rooms = schedule.addresses[shapes]
        self._letters = [0 if dtype is None else self._size(n) * dtype.itemsize for n in schedule.received]  # bytes
        self.memory = job.group.memory.of(max(map(sum, zip(self._inboxes, self._letters))))
        self._views = schedule.views.setdefault(self.memory, {}).setdefault(shapes, Views())
        self._there = self.memory.now()

    def deliver(self, steps: range) -> None:
        """Start to copy this rank's keys and values, as of when the mailbox was opened, to those ranks that need them
        among the ones so many steps to the right, one after the other."""
        known, tokens = self._views.deliveries, self.k.shape[1]
        if steps not in known:
            known[steps] = list(self._deliveries(steps))
        if not known[steps]:
            return
        with self.memory.beside(self._there):
            for rank, deliveries in known[steps]:
                for k, v, a, b in deliveries:
                    whole = b - a == tokens
                    copy_rows(k, self.k if whole else self.k.narrow(1, a, b - a))
                    copy_rows(v, self.v if whole else self.v.narrow(1, a, b - a))
                self.memory.tell(rank)

    def receive(self, r: Round) -> KeyValues:
        """The keys and values of a round of this rank: the current stream waits for them."""
        first, rows = self._rooms[self.job.rank][r.number], self.schedule.rows[self.job.rank][r.number]
        self.memory.arrived(r.owners, first, self._size(rows) * self.k.element_size())
        known = self._views.rooms
        if r.number not in known:
            known[r.number] = self._room(self.job.rank, r.number)
        return known[r.number]

    def send(self, r: Round, grads: Gradients) -> None:
        """Start to send the gradients of a round's keys to their owners' inboxes."""
        sent = [(which, *p) for which, s in enumerate((grads.dk, grads.dv)) for p in s.stretches(self.dtype)]
        with self.memory.beside(self.memory.now(), *(rows for *_, rows in sent)):
            for which, a, b, rows in sent:
                for span, letter in zip(r.spans, r.letters):
                    first, last = max(a, span.place), min(b, span.place + len(span))
                    if first < last:
                        place = slice(letter.place + first - span.place, letter.place + last - span.place)
                        copy_rows(self._inbox_of(span.owner)[which][:, place], rows[:, first - a : last - a])

    def beside(self) -> AbstractContextManager:
        """A context in which blocks are computed beside those of the current stream, from when the mailbox was opened
        on; `meet` ends it."""
        return self.memory.second(self._there)

    def meet(self) -> None:
        """What was computed beside is there."""
        self.memory.join_second()

    def close(self) -> None:
        """All ranks have read their keys and sent their gradients. Letters of a rank that is late are NaN."""
        self.memory.join()
        self.memory.meet(self._inboxes[self.job.rank], self._letters[self.job.rank])

    def letters(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, dk, dv) of every letter for this rank; to be read before the next use."""
        inbox = self._inbox_of(self.job.rank)
        for x in self.schedule.letters(self.job.rank):
            dk, dv = (g[:, x.place : x.place + len(x)] for g in inbox)
            yield slice(x.start, x.stop), dk, dv

    def _size(self, rows: int) -> int:
        """Numbers of so many rows of keys and values."""
        return KeyValues.size(rows, self.k, self.v)

    def _room(self, rank: int, number: int) -> KeyValues:
        """The room of a rank's round."""
        rows = self.schedule.rows[rank][number]
        (flat,) = self.memory.rooms(rank, self._rooms[rank][number], ((self._size(rows),),), self.k.dtype)
        return KeyValues(flat, rows, self.k, self.v)

    def _deliveries(self, steps: range) -> Iterator[tuple[int, list[Delivery]]]:
        """What goes to each rank."""
        me = self.job.rank
        for n in steps:
            rank, out = (me + n) % self.job.size, []
            for number, spans in enumerate(self.schedule.spans[rank]):
                for x in spans:
                    if x.owner == me:
                        room, rows = self._room(rank, number), slice(x.place, x.place + len(x))
                        out.append(Delivery(room.k[:, rows], room.v[:, rows], x.start, x.stop))
            if out:
                yield rank, out

    def _inbox_of(self, rank: int) -> Sequence[Tensor]:
        known, name = self._views.inboxes, (rank, self.dtype)
        if name not in known:
            shapes = tuple((x.shape[0], self.schedule.received[rank], *x.shape[2:]) for x in (self.k, self.v))
            known[name] = self.memory.rooms(rank, self._inboxes[rank], shapes, self.dtype)
        return known[name]


def _addresses(schedule: Schedule, size: Callable[[int], int], itemsize: int) -> Addresses:
    """Where inboxes and rooms stand."""
    rooms = []
    for rows in schedule.rows:
        rooms.append([0])
        for n in rows:
            rooms[-1].append(rooms[-1][-1] + _aligned(size(n) * itemsize))
    return Addresses([firsts[-1] for firsts in rooms], rooms)


def _aligned(size: int) -> int:
    """Bytes up to where the next tensor may begin."""
    return -(-size // 256) * 256


def copy_rows(into: Tensor, source: Tensor) -> None:
    """A copy in contiguous stretches, which copy engines do."""
    if into.shape[0] == 1:
        into.copy_(source, non_blocking=True)
        return
    for a, b in zip(into, source):
        a.copy_(b, non_blocking=True)
