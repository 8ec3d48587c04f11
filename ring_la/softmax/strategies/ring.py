"""Ring (Liu et al. 2023, arXiv 2310.01889): keys and values travel from rank to rank while blocks are computed.

    step n     rank r holds the keys of rank r − n, passes them on to r + 1, and computes its block
    backward   the gradient of these keys follows one step behind, gathering each rank's part, and goes home at the end

The walk ends at the last step at which any rank sees anything (a window, short documents: known on the host).
"""

from __future__ import annotations

from torch import Tensor

from ...comm import Pending
from ..merge import Gradients, Partial, zeros_like
from .job import Job, KeyValues


class Ring:
    """Neighbour to neighbour."""

    name = "ring"

    def forward(self, job: Job, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        steps = _steps(job)
        kv = KeyValues.of(k, v) if steps > 1 else None
        held_k, held_v = k, v
        for step in range(steps):
            owner = (job.rank - step) % job.size
            arriving = _pass_on(job, kv, owner, k, v) if step + 1 < steps else None
            job.forward(q, held_k, held_v, owner, out)
            if arriving is not None:
                kv = arriving.wait()
                held_k, held_v = kv.k, kv.v

    def backward(
        self, job: Job, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, delta: Tensor
    ) -> Gradients:
        steps, dq = _steps(job), zeros_like(q)
        if steps == 1:
            own = Gradients(dq, zeros_like(k), zeros_like(v))
            job.backward(do, q, k, v, o, lse, delta, job.rank, own)
            return own
        kv, following, grads = KeyValues.of(k, v), None, None
        held_k, held_v = k, v
        for step in range(steps):
            owner = (job.rank - step) % job.size
            arriving = _pass_on(job, kv, owner, k, v) if step + 1 < steps else None
            grads = KeyValues.zeros(len(job.keys[owner]), k, v)
            job.backward(do, q, held_k, held_v, o, lse, delta, owner, Gradients(dq, grads.k, grads.v))
            if following is not None:
                grads.flat.add_(following.wait().flat)
            if arriving is not None:
                following = _pass_on(job, grads, owner, k, v)
                kv = arriving.wait()
                held_k, held_v = kv.k, kv.v
        grads = _go_home(job, grads, steps - 1, k, v).wait()
        return Gradients(dq, grads.k, grads.v)


def _steps(job: Job) -> int:
    """Steps until no rank sees anything that is still on its way; at least 1."""
    p = job.size
    used = (n for n in range(p) if any(job.sees[r][(r - n) % p] for r in range(p)))
    return max(used, default=0) + 1


def _pass_on(job: Job, message: KeyValues, owner: int, k: Tensor, v: Tensor) -> Pending:
    """Post: what belongs to `owner` to the right, the same of its left neighbour from the left."""
    return _exchange(job, message, job.rank + 1, (owner - 1) % job.size, job.rank - 1, k, v)


def _go_home(job: Job, message: KeyValues, away: int, k: Tensor, v: Tensor) -> Pending:
    """Post: gradients of the keys of the rank `away` to the left to it, mine from as far on the right."""
    return _exchange(job, message, job.rank - away, job.rank, job.rank + away, k, v)


def _exchange(job: Job, message: KeyValues, to: int, coming: int, source: int, k: Tensor, v: Tensor) -> Pending:
    """Send a message and receive what belongs to `coming`; an empty message is not sent."""
    room = KeyValues.empty(len(job.keys[coming]), k, v, message.flat.dtype)
    sends = {to % job.size: message.flat} if message.flat.numel() else {}
    receives = {source % job.size: room.flat} if room.flat.numel() else {}
    pending = job.group.exchange(sends, receives)
    return Pending(lambda: (pending.wait(), room)[1])
