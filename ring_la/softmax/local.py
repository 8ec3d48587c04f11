"""Softmax attention on one device as a registered operator, so that torch.compile and export see one opaque node.

    ring_la::attention            tensors -> (o, lse)
    ring_la::attention_backward   their gradients

Registered at import with fakes, on every device; kernels are imported when first run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..autograd import traced
from ..errors import SecondDerivativeError
from . import core
from .backends import Ask, choose
from .core import Plan, Saved, Tensors
from .merge import wide
from .scores import Scores
from .strategies import Job, Ring
from .tokens import Tokens

_whole = lru_cache(maxsize=64)(Tokens.whole)  # with the tiles they were cut into


def plan(
    x: Tensors,
    alibi_slopes: Tensor | None,
    cu: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    window: tuple[int, int],
    dropout_p: float,
    joint: str,
    backend: str | None,
) -> Plan:
    """The plan of a call on one device. A window of −1 is unbounded; causal is a right window of 0."""
    left, right = (None if w < 0 else w for w in window)
    slopes = None if alibi_slopes is None else alibi_slopes.to(wide(x.q.dtype)).reshape(-1, x.q.shape[2])
    scores = Scores(scale, softcap, left, right, slopes, dropout_p, 0 if seed is None else int(seed))
    tq, tk, device = x.q.shape[1], x.k.shape[1], x.q.device
    ends: Tensor | list[int] = [tk]
    if cu is None:
        rows, keys = _whole(tq, device, None, tk - tq), _whole(tk, device, None, 0)
    elif cu.device.type == "cpu":
        rows = keys = _whole(tk, device, tuple(cu.tolist()), 0)
        ends = cu.diff().tolist()
    else:
        rows = keys = Tokens.packed(tk, cu)
        ends = cu.diff().to(torch.int64)
    shapes = (x.q.shape[2], x.k.shape[2], x.q.shape[3], x.v.shape[3])
    ask = Ask(device, x.q.dtype, *shapes, scores, host_runs=rows.runs is not None, packed=cu is not None, rows=tq)
    job = Job(choose(ask, backend), scores, (rows,), (keys,))
    joint_rows = joint_keys = None
    if x.joint_k is not None:  # before every document's first key, or after its last
        count, front = x.joint_k.shape[1], joint == "front"
        joint_rows = rows if front else rows.from_ends(ends)
        joint_keys = Tokens.joint(count, device, -count if front else 0, tk)
    return Plan(job, Ring(), joint_rows, joint_keys)


def needs_operator(x: Tensors) -> bool:
    """Whether somebody looks on who must see one node.

    A plain call spares the host the operator's layers: its own work is 0.12 of the 0.92 ms that a forward and backward
    through them takes on an H200's host.
    """
    return any(traced(t) for t in x if t is not None)


@torch.library.custom_op("ring_la::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    joint_k: Tensor | None,
    joint_v: Tensor | None,
    alibi_slopes: Tensor | None,
    cu: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    dropout_p: float,
    joint: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """One device's attention: o ``[B, Tq, H, V]`` and lse ``[B, H, Tq]``."""
    x = Tensors(q, k, v, sinks, joint_k, joint_v)
    how = plan(x, alibi_slopes, cu, seed, scale, softcap, (left, right), dropout_p, joint, backend)
    return core.forward(how, x)[:2]


@attention.register_fake
def _(q, k, v, sinks, joint_k, joint_v, alibi_slopes, cu, seed, scale, softcap, left, right, dropout_p, joint, backend):
    B, T, H, _ = q.shape
    return q.new_empty((B, T, H, v.shape[3])), q.new_empty((B, H, T), dtype=wide(q.dtype))


@torch.library.custom_op("ring_la::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    joint_k: Tensor | None,
    joint_v: Tensor | None,
    alibi_slopes: Tensor | None,
    cu: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    dropout_p: float,
    joint: str,
    backend: str | None,
) -> list[Tensor]:
    """Gradients of the tensors that are present, in order."""
    x = Tensors(q, k, v, sinks, joint_k, joint_v)
    how = plan(x, alibi_slopes, cu, seed, scale, softcap, (left, right), dropout_p, joint, backend)
    grads = core.backward(how, Saved(x, o, lse), do, dlse)
    return [g.contiguous() for g in grads if g is not None]


@attention_backward.register_fake
def _(do, dlse, o, lse, *rest):
    return [x.new_empty(x.shape) for x in rest[:6] if x is not None]


def _setup(ctx, inputs, output) -> None:
    ctx.rest = inputs[9:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:9])


def _backward(ctx, do: Tensor | None, dlse: Tensor | None):
    o, lse, *tensors = ctx.saved_tensors
    present = iter(attention_backward(do, dlse, o, lse, *tensors, *ctx.rest))
    grads = [None if x is None else next(present) for x in tensors[:6]]
    return (*grads, *[None] * (len(tensors) - 6 + len(ctx.rest)))


attention.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *grads):
    raise SecondDerivativeError(
        "ring_la.attention has exact first derivatives only; a second derivative was asked for "
        "(create_graph=True and a backward through it)"
    )


attention_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)
