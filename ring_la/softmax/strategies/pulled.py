"""A ring without hops, on the GPUs of one host: keys and values are copied from their owner's memory, and their
gradients into it, by copy engines while blocks are computed.

    forward    own keys while those of others come; then those of one owner, of the next two, of the next four …
    backward   the same with the smallest group of owners last, so that little is still to be sent when it is done:
               the gradients of each group's keys go to their owners' inboxes while the next one is computed; then
               each rank adds up what it was sent

Only keys that this rank's queries see are copied. A group of owners is one block of keys in the order of the sequence:
few, large kernel calls. What stands where is known on every rank (`Schedule`), so no sizes are exchanged.
"""

from __future__ import annotations

from torch import Tensor

from ..merge import Gradients, Partial, Sum
from .job import Job
from .mailbox import Mailbox
from .schedule import Schedule

AHEAD = 2
"""Rounds that are on their way in the forward pass; in the backward pass, which computes longer, one."""


class Pulled:
    """Every owner's keys from its memory."""

    name = "pulled"

    def forward(self, job: Job, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        schedule = Schedule.of(job)
        if not schedule.any:
            job.forward(q, k, v, job.rank, out)
            return
        box, rounds = Mailbox.open(job, k, v), schedule.rounds(job)
        box.publish(k, v)
        coming = [box.expect(r.spans) for r in rounds[:AHEAD]]
        job.forward(q, k, v, job.rank, out)  # launched before the copies are: they need not wait for it
        for arrival in coming:
            arrival.start()
        for n, r in enumerate(rounds):
            if n + AHEAD < len(rounds):
                coming.append(box.pull(rounds[n + AHEAD].spans))
            kv, coming[n] = coming[n].wait(), None
            job.forward_to(q, kv.k, kv.v, r.keys, out)
        box.close()

    def backward(
        self, job: Job, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, delta: Tensor | None
    ) -> Gradients:
        schedule, own = Schedule.of(job), Gradients.of(q, k, v)
        if not schedule.any:
            job.backward(do, q, k, v, o, lse, delta, job.rank, own)
            return own
        dtype = job.message_dtype(k.dtype)
        box, rounds = Mailbox.open(job, k, v, schedule.most_received, dtype), schedule.rounds(job)[::-1]
        box.publish(k, v)
        coming = box.expect(rounds[0].spans) if rounds else None
        job.backward(do, q, k, v, o, lse, delta, job.rank, own)
        if coming is not None:
            coming.start()
        for n, r in enumerate(rounds):
            kv, coming = coming.wait(), box.pull(rounds[n + 1].spans) if n + 1 < len(rounds) else None
            grads = Gradients(own.dq, Sum.like(kv.k), Sum.like(kv.v))
            job.backward_to(do, q, o, lse, delta, kv.k, kv.v, r.keys, grads)
            box.push(r.letters, grads)
        box.close()
        for letter in schedule.inbox(job.rank):
            rows = slice(letter.start, letter.stop)
            for total, came in zip((own.dk, own.dv), box.received(letter)):
                total.add(came, rows)
        return Gradients(own.dq, own.dk.settled(k.dtype), own.dv.settled(v.dtype))
