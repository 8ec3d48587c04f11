"""How the ring's keys and values get to a rank: handed on by the left neighbour, or copied from their owner's memory.

courier = Relay(...) or Pull(...)
arriving = courier.post(step)     the keys and values of rank r − step start to come
kv = arriving.wait()
courier.close()                   this rank has all it asked for
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...comm import Pending
from ...comm.symmetric import memory as symmetric_memory
from .job import Job, KeyValues


class Courier(Protocol):
    """Brings the keys and values of one rank after another."""

    def post(self, step: int) -> Pending:
        """Start to bring those of the rank `step` to the left; steps come in order."""
        ...

    def close(self) -> None:
        """No more will be asked for."""
        ...


def courier(job: Job, k: Tensor, v: Tensor) -> Courier:
    """The courier of a job with several ranks."""
    return Pull(job, k, v) if job.pull else Relay(job, k, v)


class Relay:
    """Each rank sends what it holds to the right and receives from the left."""

    def __init__(self, job: Job, k: Tensor, v: Tensor) -> None:
        self.job, self.k, self.v, self.held = job, k, v, KeyValues.of(k, v)

    def post(self, step: int) -> Pending:
        job = self.job
        pending = exchange(job, self.held, job.rank + 1, (job.rank - step) % job.size, job.rank - 1, self.k, self.v)

        def take() -> KeyValues:
            self.held = pending.wait()
            return self.held

        return Pending(take)

    def close(self) -> None:
        pass


class Pull:
    """Each rank puts its own into symmetric memory, and copy engines bring those of others on a side stream.

    Barriers on the device stand before the first copy and after the last, so that nobody's memory changes under a copy.
    """

    def __init__(self, job: Job, k: Tensor, v: Tensor) -> None:
        self.job, self.k, self.v = job, k, v
        most = max(len(keys) for keys in job.keys)
        self.handle = symmetric_memory(job.group, KeyValues.size(most, k, v) * k.element_size())
        own = self._of(job.rank)
        own.k.copy_(k)
        own.v.copy_(v)
        self.handle.barrier()

    def _of(self, owner: int) -> KeyValues:
        """The keys and values of a rank, in its memory."""
        tokens = len(self.job.keys[owner])
        size = (KeyValues.size(tokens, self.k, self.v),)
        return KeyValues(self.handle.get_buffer(owner, size, self.k.dtype), tokens, self.k, self.v)

    def post(self, step: int) -> Pending:
        owner = (self.job.rank - step) % self.job.size
        room = KeyValues.empty(len(self.job.keys[owner]), self.k, self.v)
        side, current = self.job.group.side_stream, torch.cuda.current_stream(self.k.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            room.flat.copy_(self._of(owner).flat)
            there = side.record_event()

        def take() -> KeyValues:
            current.wait_event(there)
            return room

        return Pending(take)

    def close(self) -> None:
        self.handle.barrier()


def exchange(job: Job, message: KeyValues, to: int, coming: int, source: int, k: Tensor, v: Tensor) -> Pending:
    """Post: send a message, receive what belongs to the rank `coming`. An empty message is not sent."""
    room = KeyValues.empty(len(job.keys[coming]), k, v, message.flat.dtype)
    sends = {to % job.size: message.flat} if message.flat.numel() else {}
    receives = {source % job.size: room.flat} if room.flat.numel() else {}
    pending = job.group.exchange(sends, receives)
    return Pending(lambda: (pending.wait(), room)[1])
