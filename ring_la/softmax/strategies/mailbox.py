"""Keys and values in memory that every rank of a host can reach, and an inbox for their gradients.

A mailbox holds [keys and values of this rank | inbox], on every rank alike, and is kept with the group. Two barriers on
the device stand in each use: one after every rank has published, before anybody copies; one after the last copy, before
anybody publishes again. Copies run on a stream of high priority beside the current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.memory import Memory
from ..merge import Gradients
from .job import Job, KeyValues
from .schedule import Letter, Span


class Mailbox:
    """One use of the memory: published keys, copies, letters.

    Args:
        job: whose ranks and tokens. k, v: this rank's, for their shapes.
        memory: the symmetric memory. received: rows of the largest inbox. dtype: of its gradients.
    """

    def __init__(self, job: Job, k: Tensor, v: Tensor, memory: Memory, received: int, dtype: torch.dtype) -> None:
        self.job, self.k, self.v, self.memory, self.dtype = job, k, v, memory, dtype
        self.most, self.room = max(len(keys) for keys in job.keys), received

    @classmethod
    def open(cls, job: Job, k: Tensor, v: Tensor, received: int = 0, dtype: torch.dtype | None = None) -> Mailbox:
        """The mailbox of a job's group, with room for an inbox of `received` rows. Collective."""
        dtype = k.dtype if dtype is None else dtype
        most = max(len(keys) for keys in job.keys)
        size = _aligned(KeyValues.size(most, k, v) * k.element_size()) + KeyValues.size(received, k, v) * dtype.itemsize
        return cls(job, k, v, Memory.kept(job.group, size), received, dtype)

    def publish(self, k: Tensor, v: Tensor) -> None:
        """Let the others copy this rank's keys and values."""
        mine = self.keys_of(self.job.rank)
        for room, x in zip(mine, (k, v)):
            room[:, : x.shape[1]].copy_(x)
        self.memory.barrier()
        self.published = self.memory.now()

    def expect(self, spans: Sequence[Span]) -> Arrival:
        """Room for stretches of the owners' keys and values, one after the other."""
        return Arrival(self, spans)

    def pull(self, spans: Sequence[Span]) -> Arrival:
        """Start to copy stretches of the owners' keys and values, after what the current stream has so far."""
        arrival = Arrival(self, spans)
        arrival.start(self.memory.now())
        return arrival

    def push(self, letters: Sequence[Letter], grads: Gradients) -> None:
        """Start to send the gradients of a round's keys to their owners' inboxes."""
        pieces = [(which, *p) for which, s in enumerate((grads.dk, grads.dv)) for p in s.pieces(self.dtype)]
        with self.memory.beside(self.memory.now(), *(rows for *_, rows in pieces)):
            for which, a, b, rows in pieces:
                offset = 0  # of a letter among the round's keys
                for x in letters:
                    first, last = max(a, offset), min(b, offset + x.stop - x.start)
                    if first < last:
                        place = slice(x.place + first - offset, x.place + last - offset)
                        _copy(self._inbox_of(x.owner)[which][:, place], rows[:, first - a : last - a])
                    offset += x.stop - x.start

    def close(self) -> None:
        """Wait, on the device, until no rank copies any more. What was received must be read before the next use."""
        self.memory.join()
        self.memory.barrier()

    def received(self, letter: Letter) -> tuple[Tensor, ...]:
        """Gradients of keys and values that were sent to this rank."""
        rows = slice(letter.place, letter.place + letter.stop - letter.start)
        return tuple(x[:, rows] for x in self._inbox_of(self.job.rank))

    def keys_of(self, rank: int) -> list[Tensor]:
        """A rank's published keys and values, ``[B, most, Hk, ·]``."""
        return self._rooms(rank, 0, self.most, self.k.dtype)

    def _inbox_of(self, rank: int) -> list[Tensor]:
        first = KeyValues.size(self.most, self.k, self.v) * self.k.element_size()
        return self._rooms(rank, _aligned(first), self.room, self.dtype)

    def _rooms(self, rank: int, first: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = tuple((x.shape[0], rows, *x.shape[2:]) for x in (self.k, self.v))
        return self.memory.rooms(rank, first, shapes, dtype)


class Arrival:
    """Keys and values that come from their owners, into room that is there from the start."""

    def __init__(self, box: Mailbox, spans: Sequence[Span]) -> None:
        self.box, self.spans = box, spans
        self.kv = KeyValues.empty(sum(s.stop - s.start for s in spans), box.k, box.v)
        self._there: Any = None

    def start(self, after: Any = None) -> None:
        """Start to copy, after a point of the current stream; None: after the keys were published."""
        with self.box.memory.beside(self.box.published if after is None else after):
            offset = 0
            for owner, a, b in self.spans:
                for into, source in zip((self.kv.k, self.kv.v), self.box.keys_of(owner)):
                    _copy(into[:, offset : offset + b - a], source[:, a:b])
                offset += b - a
            self._there = self.box.memory.now()

    def wait(self) -> KeyValues:
        """Order the current stream after the copy."""
        self.box.memory.wait(self._there)
        return self.kv


def _aligned(size: int) -> int:
    """Bytes up to where the next tensor may begin."""
    return -(-size // 256) * 256


def _copy(into: Tensor, source: Tensor) -> None:
    """A copy in contiguous stretches, which copy engines do."""
    for a, b in zip(into, source) if len(into) > 1 else ((into, source),):
        a.copy_(b, non_blocking=True)
