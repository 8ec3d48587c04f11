"""A ring without hops, on the GPUs of one host: each owner copies its keys and values into the memory of those who need
them, and gradients come back the same way, by copy engines while blocks are computed.

    forward    own keys while those of others come; then those of one owner, of the next two, of the next four …
    backward   the same with the smallest group of owners last, so that little is still to be sent when it is done:
               the gradients of each group's keys go to their owners' inboxes while the next one is computed; then
               each rank adds up what it was sent

The first block needs nobody. Backward it is launched before anything else; forward, where blocks are shorter, the
copies to the nearest rank, whose turn comes next, are launched before it. Only keys that a rank's queries see are sent
to it. A group of owners is one block of keys in the order of the sequence: few, large kernel calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from ..backends import LatentBackend, QueryRows
from ..merging import Gradients, Partial, Sum, wide
from .job import AttentionJob
from .mailbox import Mailbox
from .schedule import Round, Schedule

SHORT = 4096
"""Tokens of a rank up to which a captured call takes two streams. Measured on two H200 (32 heads of 128, cuDNN) in CUDA
graphs, forward + backward: 0.84 (causal) and 0.87 (full) of one stream's time at 1,152 tokens, 0.93 and 0.99 at 4,096;
longer ones were not timed. Eagerly hosts are what calls wait for, and a second stream costs them up to 0.5 ms."""


class Copied:
    """Every owner's keys by its copy engines.

    Attributes:
        two_streams: whether every other round is computed on a second stream: kernels whose last blocks leave a GPU
            half idle then overlap with the next round's first ones. None: where that was measured to be faster.
    """

    name = "copied"

    def __init__(self, two_streams: bool | None = None) -> None:
        self.two_streams = two_streams

    def forward(self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        schedule = Schedule.of(job)
        if not schedule.any:
            job.forward(q, k, v, job.rank, out)
            return
        box = Mailbox(job, schedule, k, v)
        box.deliver(range(1, 2))
        job.forward(q, k, v, job.rank, out)
        box.deliver(range(2, job.size))
        other = out.like()
        for r, beside in self._turns(job, q, schedule.rounds(job.rank)):
            with box.beside() if beside else nullcontext():
                kv = box.receive(r)
                job.forward_to(q, kv.k, kv.v, r.keys, other if beside else out)
        box.meet()
        out.take(other)
        box.close()

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        schedule, own = Schedule.of(job), Gradients.of(x.q, k, v)
        if not schedule.any:
            job.backward(x, k, v, job.rank, own)
            return own
        box = Mailbox(job, schedule, k, v, job.message_dtype(k.dtype))
        job.backward(x, k, v, job.rank, own)
        box.deliver(range(job.size - 1, 0, -1))
        other = Sum.like(x.q)
        for r, beside in self._turns(job, x.q, reversed(schedule.rounds(job.rank))):
            with box.beside() if beside else nullcontext():
                kv = box.receive(r)
                grads = Gradients(other if beside else own.dq, Sum.like(kv.k), Sum.like(kv.v))
                job.backward_to(x, kv.k, kv.v, r.keys, grads)
                box.send(r, grads)
        box.meet()
        own.dq.take(other)
        box.close()
        for rows, dk, dv in box.letters():
            own.dk.add(dk, rows)
            own.dv.add(dv, rows)
        of_sums = wide(k.dtype) if job.scores.sums else k.dtype  # parts of sums add up where nothing is rounded
        return Gradients(own.dq, own.dk.settled(of_sums), own.dv.settled(v.dtype))

    def _turns(self, job: AttentionJob, q: Tensor, rounds: Iterable[Round]) -> Iterator[tuple[Round, bool]]:
        """Rounds, each with whether it is computed on the second stream: the first one is, beside the own block."""
        two = self.overlaps(job, q)
        for n, r in enumerate(rounds):
            yield r, two and n % 2 == 0

    def overlaps(self, job: AttentionJob, q: Tensor) -> bool:
        """Whether the rounds of these queries are computed on two streams. A kernel on latents sums the gradients of
        what raises them over blocks, in one stream's order."""
        if isinstance(job.backend, LatentBackend):
            return False
        if self.two_streams is not None:
            return self.two_streams
        return q.is_cuda and q.shape[1] <= SHORT and torch.cuda.is_current_stream_capturing()
