"""Ring (Liu et al. 2023, arXiv 2310.01889): keys and values come from rank after rank while blocks are computed.

    step n     rank r computes its block with the keys of rank r − n, while those of r − n − 1 are on their way
    backward   the gradient of these keys moves on to the right one step behind, gathering each rank's part, and goes
               home at the end

The walk ends at the last step at which any rank sees anything (a window, short documents: known on the host). Whole
shards travel, since those further on may need what a rank does not; `sent.py` sends each rank what it needs.
"""

from __future__ import annotations

from torch import Tensor

from ...comm import Pending
from ..backends import QueryRows
from ..merging import Gradients, Partial, Sum, wide
from .job import AttentionJob, KeyValues


class KeyRing:
    """One holder's keys at a time, handed on to the right."""

    name = "ring"

    def forward(self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        steps = _steps(job)
        if steps == 1:
            job.forward(q, k, v, job.rank, out)
            return
        kv = KeyValues.of(k, v)
        for step in range(steps):
            arriving = _hand_on(job, kv, step + 1, k, v) if step + 1 < steps else None
            job.forward(q, kv.k, kv.v, (job.rank - step) % job.size, out)
            if arriving is not None:
                kv = arriving.wait()

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        steps, dq = _steps(job), Sum.like(x.q)
        if steps == 1:
            own = Gradients(dq, Sum.like(k), Sum.like(v))
            job.backward(x, k, v, job.rank, own)
            return own
        kv, following, message = KeyValues.of(k, v), None, None
        for step in range(steps):
            owner = (job.rank - step) % job.size
            arriving = _hand_on(job, kv, step + 1, k, v) if step + 1 < steps else None
            grads = Gradients(dq, Sum.like(kv.k), Sum.like(kv.v))
            job.backward(x, kv.k, kv.v, owner, grads)
            if following is not None:
                came = following.wait()
                grads.dk.add(came.k)
                grads.dv.add(came.v)
            message = KeyValues.empty(len(job.keys[owner]), k, v, wide(k.dtype))
            grads.dk.write(message.k)
            grads.dv.write(message.v)
            if arriving is not None:
                following = _exchange(job, message, job.rank + 1, (owner - 1) % job.size, job.rank - 1, k, v)
                kv = arriving.wait()
        away = steps - 1  # the gradients at hand belong to the rank this far to the left, mine are as far to the right
        mine = _exchange(job, message, job.rank - away, job.rank, job.rank + away, k, v).wait()
        own = Gradients(dq, Sum.like(k), Sum.like(v))
        own.dk.add(mine.k)
        own.dv.add(mine.v)
        return own


def _steps(job: AttentionJob) -> int:
    """Steps until no rank sees anything that has not come yet; at least 1."""
    p = job.size
    used = (n for n in range(p) if any(job.sees[r][(r - n) % p] for r in range(p)))
    return max(used, default=0) + 1


def _hand_on(job: AttentionJob, held: KeyValues, step: int, k: Tensor, v: Tensor) -> Pending:
    """Post: the keys and values held go to the right, those of the rank `step` to the left come."""
    return _exchange(job, held, job.rank + 1, (job.rank - step) % job.size, job.rank - 1, k, v)


def _exchange(
    job: AttentionJob, message: KeyValues, to: int, coming: int, source: int, k: Tensor, v: Tensor
) -> Pending:
    """Post: send a message, receive what belongs to the rank `coming`. An empty message is not sent."""
    room = KeyValues.empty(len(job.keys[coming]), k, v, message.flat.dtype)
    sends = {to % job.size: message.flat} if message.flat.numel() else {}
    receives = {source % job.size: room.flat} if room.flat.numel() else {}
    pending = job.group.exchange(sends, receives)
    return Pending(lambda: (pending.wait(), room)[1])
