"""A ring without hops by messages: an owner sends each rank those of its keys and values that this rank's queries see,
and gradients come straight home.

    step n     rank r computes its block with what it sees of the keys of rank r − n, while that of the next step comes
    backward   the gradients of these keys go home while the next block is computed; their owner adds them up

Steps at which nobody sees anything are left out. On one host this is never more bytes than hand to hand. Over several
hosts a key that many ranks see would leave its host once for each of them, so it is taken there only where no owner's
keys go to more than `FEW` ranks; see `SendPlan.straight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm import Group, Pending
from ..backends import QueryRows
from ..geometry import Reach, Tokens
from ..merging import Gradients, Partial, Sum
from .job import AttentionJob, KeyValues
from .schedule import Stretches, needs_of

FEW = 2


@dataclass(frozen=True)
class SendStep:
    """What one rank sends and receives at a step.

    Attributes:
        number: keys go so many ranks to the right.
        leaving: stretches of this rank's keys, for the rank on the right.
        arriving: stretches of the keys of the rank on the left, for this one.
        keys: where the arriving keys stand; None: none do.
    """

    number: int
    leaving: Stretches
    arriving: Stretches
    keys: Tokens | None


class SendPlan:
    """The steps of one job, made once for its rows, keys and mask.

    Attributes:
        fan: as the function `fan` has it.
    """

    def __init__(self, job: AttentionJob) -> None:
        needs = needs_of(job.rows, job.keys, job.scores.reach)
        p, me = job.size, job.rank
        self.fan = fan(needs)
        self.steps: list[SendStep] = []
        for n in range(1, p):
            if any(needs[r][(r - n) % p] for r in range(p)):
                source = (me - n) % p
                cuts = [job.keys[source].cut(a, b) for a, b in needs[me][source]]
                leaving, arriving = needs[(me + n) % p][me], needs[me][source]
                self.steps.append(SendStep(n, leaving, arriving, Tokens.joined(cuts) if cuts else None))

    @classmethod
    def of(cls, job: AttentionJob) -> SendPlan:
        """The plan of a job."""
        return job.against(job.keys[job.rank]).kept(cls, lambda: cls(job))

    def straight(self, job: AttentionJob) -> bool:
        """Whether owners send to those who need keys, rather than from hand to hand. The same on all ranks."""
        return job.size == 1 or straight(job.group, self.fan)


def fan(needs: list[list[Stretches]]) -> int:
    """How many other ranks see keys of one owner, at most."""
    ranks = range(len(needs))
    return max(sum(bool(needs[r][s]) for r in ranks if r != s) for s in ranks)


def straight(group: Group, most: int) -> bool:
    """Whether owners send to those who need keys, where each does so to `most` ranks at most."""
    return group.one_host or most <= FEW


def share_sent(rows: Sequence[Tokens], keys: Sequence[Tokens], reach: Reach, group: Group) -> float:
    """What a ring sends of all keys to all other ranks: those that are seen, or from hand to hand everything."""
    needs, p = needs_of(rows, keys, reach), group.size
    if p == 1 or not straight(group, fan(needs)):
        return 1.0
    sent = sum(_length(needs[r][s]) for r in range(p) for s in range(p) if r != s)
    return sent / max(1, (p - 1) * sum(map(len, keys)))


class KeySend:
    """Every owner's keys by messages."""

    name = "sent"

    def forward(self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        steps = SendPlan.of(job).steps
        coming = _fetch(job, steps[:1], k, v)
        job.forward(q, k, v, job.rank, out)
        for i, step in enumerate(steps):
            kv = coming.wait()
            coming = _fetch(job, steps[i + 1 : i + 2], k, v)
            if step.keys is not None:
                job.forward_to(q, kv.k, kv.v, step.keys, out)

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        steps, own = SendPlan.of(job).steps, Gradients.of(x.q, k, v)
        coming = _fetch(job, steps[:1], k, v)
        job.backward(x, k, v, job.rank, own)
        letters: list[tuple[SendStep, Pending]] = []
        for i, step in enumerate(steps):
            kv = coming.wait()
            coming = _fetch(job, steps[i + 1 : i + 2], k, v)
            grads = Gradients(own.dq, Sum.like(kv.k), Sum.like(kv.v))
            if step.keys is not None:
                job.backward_to(x, kv.k, kv.v, step.keys, grads)
            letters.append((step, _send_home(job, step, grads, k, v)))
            if i:
                _take(own, *letters.pop(0))
        for letter in letters:
            _take(own, *letter)
        return own


def _fetch(job: AttentionJob, step: list[SendStep], k: Tensor, v: Tensor) -> Pending:
    """Post: keys go to the right, others come from the left, as a step (none: nothing does) says."""
    if not step:
        return Pending(lambda: None)
    (s,) = step
    rows = KeyValues.of(_cut(k, s.leaving), _cut(v, s.leaving)) if s.leaving else None
    return _exchange(job, rows, s.number, _length(s.arriving), k, v, k.dtype)


def _send_home(job: AttentionJob, step: SendStep, grads: Gradients, k: Tensor, v: Tensor) -> Pending:
    """Post: gradients of the keys that came go back, those of this rank's keys come."""
    dtype, rows = job.message_dtype(k.dtype), None
    if step.keys is not None:
        rows = KeyValues.empty(len(step.keys), k, v, dtype)
        grads.dk.write(rows.k)
        grads.dv.write(rows.v)
    return _exchange(job, rows, -step.number, _length(step.leaving), k, v, dtype)


def _exchange(
    job: AttentionJob, rows: KeyValues | None, right: int, coming: int, k: Tensor, v: Tensor, dtype: torch.dtype
) -> Pending:
    """Post: send rows so many ranks to the right, receive `coming` from as far to the left; the result are these. Rows
    of no heads, which Ulysses may leave to a rank, are not sent."""
    assert job.group is not None
    room = KeyValues.empty(coming, k, v, dtype)
    sends = {(job.rank + right) % job.size: rows.flat} if rows is not None and rows.flat.numel() else {}
    receives = {(job.rank - right) % job.size: room.flat} if room.flat.numel() else {}
    pending = job.group.exchange(sends, receives)
    return Pending(lambda: (pending.wait(), room)[1])


def _take(own: Gradients, step: SendStep, pending: Pending) -> None:
    """Add what came of the gradients of this rank's keys."""
    letter, place = pending.wait(), 0
    for a, b in step.leaving:
        own.dk.add(letter.k[:, place : place + b - a], slice(a, b))
        own.dv.add(letter.v[:, place : place + b - a], slice(a, b))
        place += b - a


def _cut(x: Tensor, stretches: Stretches) -> Tensor:
    parts = [x.narrow(1, a, b - a) for a, b in stretches]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _length(stretches: Stretches) -> int:
    return sum(b - a for a, b in stretches)
