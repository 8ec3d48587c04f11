"""Softmax attention of one rank's queries, forward and backward: the moves every call is made of.

    heads for tokens (Ulysses), if at all
    sinks, then keys every rank holds (joint tokens), then the keys of all ranks (the strategy)
    tokens for heads again

Where latents travel in the places of keys and values, a kernel on latents stands around the one that computes.

The backward pass starts from the global o and lse, so each block's gradient is exact by itself, and the sink's is
``−Σ exp(sink − lse) Δ``. Calling a plan records one autograd Function for all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..autograd import bare, first_derivative_only, full_precision
from ..choices import LatentForm
from . import sums
from .backends import FORMS, ChosenBackend, LatentBackend, QueryRows, exact
from .backends.canonical import Canonical
from .geometry import Pair
from .merging import Gradients, Partial, Sum, row_sums
from .results import results
from .strategies import AttentionJob, Heads, PostedKeys, Strategy, post_keys
from .tensors import Tensors
from .wire import Unpacking, pack


class Saved(NamedTuple):
    """What the backward pass needs: the tensors as they were computed on, and the results."""

    tensors: Tensors
    o: Tensor
    lse: Tensor


@dataclass(frozen=True)
class AttentionMoves:
    """One call on one rank, but for its tensors.

    Attributes:
        job, strategy: the keys that are split, and how they travel.
        joint: queries and joint keys, as they stand to each other.
        heads: the exchange of heads for tokens, or None.
        form: how queries meet latents, where these travel.
        kv_comm_dtype: in what keys and values travel; None: in their own dtype.
        way_back: makes of the call that this rank is in what its backward pass calls first (`Agreement.way_back`).
        sum_tokens: under a deterministic layout, of rows ``[n, …]`` and a tensor like their sum this rank's part of it.
    """

    job: AttentionJob
    strategy: Strategy
    joint: Pair | None = None
    heads: Heads | None = None
    form: LatentForm | None = None
    kv_comm_dtype: torch.dtype | None = None
    way_back: Callable[[], Callable[[], None]] | None = None
    sum_tokens: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """o and lse of this rank's queries, recorded for gradients."""
        return recorded(self, x)

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor, Saved]:
        """o ``[B, T, H, V]`` in the inputs' dtype and lse ``[B, H, T]``, wide, and what to save."""
        with full_precision(x.q):
            width = x.value_width
            if self.kv_comm_dtype is not None:
                x = x._replace(k=pack(x.k, self.kv_comm_dtype), v=pack(x.v, self.kv_comm_dtype))
            if self.heads is not None:
                x = _take_heads(self.heads, x)
            o, lse = self._blocks(x, width)
            saved = Saved(x, o, lse)
            if self.heads is not None:
                o, lse = _give_heads(self.heads, o, lse)
        return o, lse, saved

    def post(self, x: Tensors, first: bool) -> PostedKeys:
        """Start to bring x's keys and values to all ranks; its queries are only like those to come. Of plans without
        heads for tokens, sinks and joint keys."""
        if self.kv_comm_dtype is not None:
            x = x._replace(k=pack(x.k, self.kv_comm_dtype), v=pack(x.v, self.kv_comm_dtype))
        return post_keys(self._job(x), x.k, x.v, first)

    def attend(self, posted: PostedKeys, q: Tensor, width: int) -> Tensor:
        """o ``[B, T, H, V]`` of this rank's queries over keys that `post` has sent, whose values have `width`
        channels."""
        with full_precision(q):
            out = Partial((*q.shape[:3], width), q.dtype, q.device)
            posted.attend(q, out)
            return out.result()[0]

    def saved(self, x: Tensors, o: Tensor, lse: Tensor) -> Saved:
        """What `forward` saves, from its tensors and results: heads travel once more."""
        if self.heads is None:
            return Saved(x, o, lse)
        return Saved(_take_heads(self.heads, x), *_take_results(self.heads, o, lse))

    def backward(self, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Tensors:
        """The gradients, in the inputs' dtypes."""
        if self.heads is not None:
            do, dlse = _take_gradients(self.heads, saved, do, dlse)
        grads = self._block_gradients(saved, do, dlse)
        return grads if self.heads is None else _give_gradients(self.heads, grads)

    def _job(self, x: Tensors, needs_delta: bool = False) -> AttentionJob:
        """The job with the kernel for these tensors."""
        backend = exact(self.job.backend) if needs_delta else self.job.backend
        if isinstance(backend, ChosenBackend):
            backend = backend.of(x.chosen)
        if self.form is not None:
            backend = FORMS[self.form](backend, x.up_k, x.up_v)
        if self.kv_comm_dtype is not None:
            backend = Unpacking(backend, self.kv_comm_dtype)
        return self.job if backend is self.job.backend else replace(self.job, backend=backend)

    def _blocks(self, x: Tensors, width: int) -> tuple[Tensor, Tensor]:
        job, out = self._job(x), Partial((*x.q.shape[:3], width), x.q.dtype, x.q.device)
        if x.sinks is not None:
            out.start(x.sinks)
        if x.joint_k is not None and x.q.numel() and x.joint_k.numel():
            job.backend.forward(x.q, x.joint_k, x.joint_v, job.scores, self.joint, out)
        self.strategy.forward(job, x.q, x.k, x.v, out)
        return out.result()

    def _block_gradients(self, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Tensors:
        """Gradients of all tensors, in their dtypes."""
        x, o, lse = saved
        apart = self.form == "absorbed" and self.job.size > 1  # kernels that form do·o would form it of a rank's keys
        job = self._job(x, needs_delta=dlse is not None or apart)
        delta = None
        if isinstance(job.backend, Canonical):
            delta = job.backend.row_sums(do, o, dlse, job.rows[job.rank])
        elif job.backend.takes_delta or x.sinks is not None:
            delta = row_sums(do, o, dlse)
        rows = QueryRows(x.q, o, torch.zeros_like(o) if do is None else do.to(o.dtype), lse, delta)
        split = self.strategy.backward(job, rows, x.k, x.v)
        dsinks = djoint_k = djoint_v = None
        if x.joint_k is not None:
            out = Gradients(split.dq, Sum.like(x.joint_k), Sum.like(x.joint_v))
            if x.q.numel() and x.joint_k.numel():
                job.backend.backward(rows, x.joint_k, x.joint_v, job.scores, self.joint, out)
            djoint_k, djoint_v = out.dk.result(x.joint_k.dtype), out.dv.result(x.joint_v.dtype)
        if x.sinks is not None:
            assert delta is not None
            dsinks = self._sink_gradient(job, x.sinks, lse, delta)
        found = sums.found((split.dq, split.dk), x.q.dtype, job.scores.sums) if job.scores.sums else None
        inputs = [s.result(x.q.dtype) for s in (split.dq, split.dk, split.dv)]
        if found is not None:
            sums.put((inputs[0], inputs[1]), found, job.scores.sums)
        up = job.backend.up_gradients() if isinstance(job.backend, LatentBackend) else ()
        return Tensors(*inputs, dsinks, djoint_k, djoint_v, *up)  # type: ignore[call-arg]

    def _sink_gradient(self, job: AttentionJob, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """``−Σ exp(sink − lse) Δ`` ``[H]``, this rank's part; lse and Δ ``[B, H, T]``."""
        if isinstance(job.backend, Canonical):
            rows = job.backend.sink_rows(sinks, lse, delta, job.rows[job.rank])
        else:
            rows = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse) * delta
        if self.sum_tokens is not None:
            return -self.sum_tokens(rows.transpose(1, 2).flatten(0, 1), sinks)
        return -rows.sum((0, 2)).to(sinks.dtype)


class Moves(Protocol):
    """What a call asks of its plan: `AttentionMoves`, or several of them."""

    @property
    def way_back(self) -> Callable[[], Callable[[], None]] | None: ...

    def __call__(self, x: Tensors) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor, Saved]: ...

    def saved(self, x: Tensors, o: Tensor, lse: Tensor) -> Saved: ...

    def backward(self, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Tensors: ...


def recorded(plan: Moves, x: Tensors) -> tuple[Tensor, Tensor]:
    """o and lse of a call, recorded for gradients where these are wanted."""
    if not bare(*x):
        return _Planned.apply(plan, *x)
    o, lse, _ = plan.forward(x)
    return o, lse


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Moves, *tensors: Tensor | None):
        o, lse, saved = results(plan, Tensors(*tensors))
        ctx.plan, ctx.way_back = plan, plan.way_back and plan.way_back()
        ctx.save_for_backward(*saved.tensors, saved.o, saved.lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):
        *tensors, o, lse = ctx.saved_tensors
        if ctx.way_back is not None:
            ctx.way_back()
        return None, *ctx.plan.backward(Saved(Tensors(*tensors), o, lse), do, dlse)


# -- heads for tokens, and back ----------------------------------------------------------------------------


def _take_heads(heads: Heads, x: Tensors) -> Tensors:
    """The tensors of this rank's heads, of all tokens."""
    split = heads.to_heads(q=("q", x.q), k=("k", x.k), v=("k", x.v)).wait()
    sinks = None if x.sinks is None else x.sinks[heads.query_heads]
    joint = [None if t is None else heads.repeat(t[:, :, heads.key_heads]) for t in (x.joint_k, x.joint_v)]
    up = [None if t is None else t[heads.query_heads] for t in (x.up_k, x.up_v)]
    return Tensors(split["q"], heads.repeat(split["k"]), heads.repeat(split["v"]), sinks, *joint, *up)


def _give_heads(heads: Heads, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """All heads of this rank's tokens."""
    came = heads.to_tokens(o=("q", o), lse=("q", lse.mT.unsqueeze(-1))).wait()
    return came["o"], came["lse"].squeeze(-1).mT.contiguous()


def _take_gradients(heads: Heads, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """do and dlse of this rank's heads. dlse travels where lse was used, which must be on every rank or on none."""
    if do is None:
        do = saved.o.new_zeros(heads.local_shape(saved.o))
    return _take_results(heads, do.to(saved.o.dtype), dlse)


def _take_results(heads: Heads, o: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """o and lse, or their gradients, of this rank's heads."""
    more = {} if lse is None else {"lse": ("q", lse.mT.unsqueeze(-1))}
    came = heads.to_heads(o=("q", o), **more).wait()
    return came["o"], came["lse"].squeeze(-1).mT if lse is not None else None


def _give_gradients(heads: Heads, grads: Tensors) -> Tensors:
    """Gradients of all heads of this rank's tokens; of shared tensors the part of this rank's heads."""
    q, k, v, sinks, joint_k, joint_v, up_k, up_v = grads.differentiable
    posted = heads.to_tokens(q=("q", q), k=("k", heads.fold(k)), v=("k", heads.fold(v)))
    sinks, up_k, up_v = (None if g is None else heads.among_queries(g) for g in (sinks, up_k, up_v))
    if joint_k is not None:
        joint_k, joint_v = (heads.among_all(heads.fold(g)) for g in (joint_k, joint_v))
    return Tensors(*posted.wait().values(), sinks, joint_k, joint_v, up_k, up_v)  # type: ignore[call-arg]
