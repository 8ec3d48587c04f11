"""All-gather whose keys leave before the queries are there: a caller with something else to compute posts them first.

    post      every rank's keys and values start for all other ranks
    attend    they are there; one kernel call for all keys, in the order of the sequence

On the GPUs of one host copy engines bring them into rooms that every rank has for all keys, its own among them. There
are two rooms, taken in turns, so no barrier ends a use (`TakenInTurns`). Elsewhere they go by a message.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Protocol

from torch import Tensor

from ...comm.memory import Memory
from ..merging import Partial
from .all_gather import gather_keys
from .job import AttentionJob, KeyValues
from .mailbox import copy_rows


class PostedKeys(Protocol):
    """Keys and values on their way to all ranks."""

    def attend(self, q: Tensor, out: Partial) -> None:
        """Add attention of this rank's queries over all keys to `out`."""
        ...


def post_keys(job: AttentionJob, k: Tensor, v: Tensor, first: bool) -> PostedKeys:
    """Start to bring this rank's keys and values to all ranks. Collective, as `PostedKeys.attend` is, in which it must
    end before the next of the same group. `first`: see `TakenInTurns.of`."""
    copied = job.group is not None and job.size > 1 and job.group.copies and job.order is None
    return CopiedAhead(job, k, v, first) if copied else SentAhead(job, k, v)


class SentAhead:
    """By one message."""

    def __init__(self, job: AttentionJob, k: Tensor, v: Tensor) -> None:
        self._job, self._coming = job, gather_keys(job, k, v)

    def attend(self, q: Tensor, out: Partial) -> None:
        k, v = self._coming.wait()
        self._job.forward_to(q, k, v, self._job.all_keys, out)


class CopiedAhead:
    """By copy engines, beside what the current stream computes meanwhile."""

    def __init__(self, job: AttentionJob, k: Tensor, v: Tensor, first: bool) -> None:
        self._job, self._k, self._v = job, k.contiguous(), v.contiguous()
        self._turns = job.group.turns
        self._size = KeyValues.size(sum(map(len, job.keys)), k, v) * k.element_size()
        self._memory: Memory = self._turns.of(self._size, first)
        self._turns.open = self._end
        me = job.rank
        rows = list(pairwise(accumulate(map(len, job.keys), initial=0)))
        with self._memory.beside(self._memory.now()):
            for n in range(1, job.size + 1):
                rank = (me + n) % job.size
                room = self._room(rank)
                copy_rows(room.k[:, slice(*rows[me])], self._k)
                copy_rows(room.v[:, slice(*rows[me])], self._v)
                if rank != me:
                    self._memory.tell(rank)

    def _room(self, rank: int) -> KeyValues:
        (flat,) = self._memory.rooms(rank, 0, ((self._size // self._k.element_size(),),), self._k.dtype)
        return KeyValues(flat, sum(map(len, self._job.keys)), self._k, self._v)

    def _end(self) -> None:
        """What comes from others has come, and this rank's keys have gone."""
        me, size = self._job.rank, self._job.size
        self._memory.arrived((1 << size) - 1 - (1 << me), 0, self._size)
        self._memory.join()
        self._turns.open = None

    def attend(self, q: Tensor, out: Partial) -> None:
        self._end()
        room = self._room(self._job.rank)
        self._job.forward_to(q, room.k, room.v, self._job.all_keys, out)
