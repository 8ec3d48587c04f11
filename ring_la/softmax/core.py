"""Softmax attention of one rank's queries, forward and backward: the blocks every call is made of.

    keys every rank holds (joint tokens), then the keys of all ranks (the strategy), then sinks

The backward pass starts from the global o and lse, so each block's gradient is exact by itself, and the sink's is
``−Σ exp(sink − lse) Δ``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import exact
from .merge import Gradients, Partial, row_sums, wide, zeros_like
from .strategies import Job
from .strategies.job import Strategy
from .tokens import Tokens


class Tensors(NamedTuple):
    """The differentiable tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    joint_k: Tensor | None = None
    joint_v: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """One call on one rank, but for its tensors.

    Attributes:
        job, strategy: the keys that are split, and how they travel.
        joint_rows, joint_keys: where queries and joint keys stand to each other.
    """

    job: Job
    strategy: Strategy
    joint_rows: Tokens | None = None
    joint_keys: Tokens | None = None


def forward(plan: Plan, x: Tensors) -> tuple[Tensor, Tensor]:
    """o ``[B, T, H, V]`` in the inputs' dtype and lse ``[B, H, T]``, wide."""
    job = plan.job
    out = Partial((*x.q.shape[:3], x.v.shape[3]), x.q.dtype, x.q.device)
    with torch.autocast(x.q.device.type, enabled=False):
        if x.joint_k is not None:
            job.backend.forward(x.q, x.joint_k, x.joint_v, job.scores, plan.joint_rows, plan.joint_keys, out)
        plan.strategy.forward(job, x.q, x.k, x.v, out)
        if x.sinks is not None:
            out.add_sink(x.sinks)
        return out.result()


def backward(plan: Plan, x: Tensors, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None) -> Tensors:
    """The gradients, in the inputs' dtypes."""
    job = plan.job
    if dlse is not None and not job.backend.takes_delta:
        job = replace(job, backend=exact(job.backend))
    delta = row_sums(do, o, dlse)
    do = torch.zeros_like(o) if do is None else do.to(o.dtype)
    dq, dk, dv = (g for g in vars(plan.strategy.backward(job, do, x.q, x.k, x.v, o, lse, delta)).values())
    dsinks = djoint_k = djoint_v = None
    if x.joint_k is not None:
        djoint_k, djoint_v = zeros_like(x.joint_k), zeros_like(x.joint_v)
        joint = Gradients(dq, djoint_k, djoint_v)
        rows, keys = plan.joint_rows, plan.joint_keys
        job.backend.backward(do, x.q, x.joint_k, x.joint_v, o, lse, delta, job.scores, rows, keys, joint)
    if x.sinks is not None:
        dsinks = -(torch.exp(x.sinks.to(wide(o.dtype))[None, :, None] - lse) * delta).sum((0, 2))
    grads = (dq, dk, dv, dsinks, djoint_k, djoint_v)
    return Tensors(*(None if t is None else g.to(t.dtype) for t, g in zip(x, grads)))
