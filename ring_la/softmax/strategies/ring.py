"""Ring (Liu et al. 2023, arXiv 2310.01889): keys and values come from rank after rank while blocks are computed.

    step n     rank r computes its block with the keys of rank r − n, while those of r − n − 1 are on their way
    backward   the gradient of these keys moves on to the right one step behind, gathering each rank's part, and goes
               home at the end

The walk ends at the last step at which any rank sees anything (a window, short documents: known on the host).
"""

from __future__ import annotations

from torch import Tensor

from ..merge import Gradients, Partial, zeros_like
from .courier import courier, exchange
from .job import Job, KeyValues


class Ring:
    """One holder's keys at a time."""

    name = "ring"

    def forward(self, job: Job, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        steps = _steps(job)
        if steps == 1:
            job.forward(q, k, v, job.rank, out)
            return
        messages = courier(job, k, v)
        for step in range(steps):
            arriving = messages.post(step + 1) if step + 1 < steps else None
            job.forward(q, k, v, (job.rank - step) % job.size, out)
            if arriving is not None:
                kv = arriving.wait()
                k, v = kv.k, kv.v
        messages.close()

    def backward(
        self, job: Job, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, delta: Tensor
    ) -> Gradients:
        steps, dq = _steps(job), zeros_like(q)
        if steps == 1:
            own = Gradients(dq, zeros_like(k), zeros_like(v))
            job.backward(do, q, k, v, o, lse, delta, job.rank, own)
            return own
        messages, following, grads = courier(job, k, v), None, None
        for step in range(steps):
            owner = (job.rank - step) % job.size
            arriving = messages.post(step + 1) if step + 1 < steps else None
            grads = KeyValues.zeros(len(job.keys[owner]), k, v)
            job.backward(do, q, k, v, o, lse, delta, owner, Gradients(dq, grads.k, grads.v))
            if following is not None:
                grads.flat.add_(following.wait().flat)
            if arriving is not None:
                following = exchange(job, grads, job.rank + 1, (owner - 1) % job.size, job.rank - 1, k, v)
                kv = arriving.wait()
                k, v = kv.k, kv.v
        messages.close()
        away = steps - 1  # the gradients at hand belong to the rank this far to the left, mine are as far to the right
        mine = exchange(job, grads, job.rank - away, job.rank, job.rank + away, k, v).wait()
        return Gradients(dq, mine.k, mine.v)


def _steps(job: Job) -> int:
    """Steps until no rank sees anything that has not come yet; at least 1."""
    p = job.size
    used = (n for n in range(p) if any(job.sees[r][(r - n) % p] for r in range(p)))
    return max(used, default=0) + 1
