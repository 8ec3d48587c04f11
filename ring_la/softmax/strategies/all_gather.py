"""All-gather (Llama 3's way, arXiv 2407.21783): everybody gets all keys and values at once, then few large calls.

Best where keys and values are few (GQA), for it holds all of them; the backward pass gathers them again and sends each
rank the parts of its keys' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...comm import Pending
from ..backends import QueryRows
from ..merging import Gradients, Partial, Sum
from .job import AttentionJob, KeyValues


class KeyGather:
    """Everything everywhere."""

    name = "all_gather"

    def forward(self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, out: Partial) -> None:
        k, v = gather_keys(job, k, v).wait()
        job.forward_to(q, k, v, job.all_keys, out)

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        all_k, all_v = gather_keys(job, k, v).wait()
        grads = Gradients.of(x.q, all_k, all_v)
        job.backward_to(x, all_k, all_v, job.all_keys, grads)
        dtype, own = job.message_dtype(k.dtype), Gradients(grads.dq, Sum.like(k), Sum.like(v))
        for part in _scatter(job, grads.dk.result(dtype), grads.dv.result(dtype), k, v).wait():
            own.dk.add(part.k)
            own.dv.add(part.v)
        return own


def gather_keys(job: AttentionJob, k: Tensor, v: Tensor) -> Pending:
    """Post: the keys and values of all ranks, in the order of ``job.all_keys``."""
    if job.size == 1:
        return Pending(lambda: (_ordered(k, job.order), _ordered(v, job.order)))
    own, tokens = KeyValues.of(k, v).flat, [len(keys) for keys in job.keys]
    padded = own.new_zeros(KeyValues.size(max(tokens), k, v))
    padded[: own.numel()] = own
    pending = job.group.all_gather(padded)

    def unpack() -> tuple[Tensor, Tensor]:
        came, places = pending.wait(), _places(job)
        keys, values = (x.new_empty(x.shape[0], sum(tokens), *x.shape[2:]) for x in (k, v))
        for n, at, flat in zip(tokens, places, came):
            part = KeyValues(flat[: KeyValues.size(n, k, v)], n, k, v)
            _put(keys, at, part.k)
            _put(values, at, part.v)
        return keys, values

    return Pending(unpack)


def _places(job: AttentionJob) -> Sequence[slice | Tensor]:
    """For each rank the rows of ``job.all_keys`` that its keys are."""
    tokens = [len(keys) for keys in job.keys]
    if job.order is None:
        return [slice(end - n, end) for n, end in zip(tokens, accumulate(tokens))]
    numbers = torch.arange(len(job.order), device=job.order.device)
    return list(torch.empty_like(job.order).index_copy_(0, job.order, numbers).split(tokens))


def _put(out: Tensor, at: slice | Tensor, rows: Tensor) -> None:
    if isinstance(at, slice):
        out[:, at] = rows
    else:
        out.index_copy_(1, at, rows)


def _take(out: Tensor, x: Tensor, at: slice | Tensor) -> None:
    if isinstance(at, slice):
        out.copy_(x[:, at])
    else:
        torch.index_select(x, 1, at, out=out)


def _scatter(job: AttentionJob, dk: Tensor, dv: Tensor, k: Tensor, v: Tensor) -> Pending:
    """Post: each rank's part of the gradients to it; the result is what came for this rank, of each rank."""
    if job.size == 1:
        return Pending(lambda: [KeyValues.of(*(_unordered(x, job.order) for x in (dk, dv)))])
    tokens = [len(keys) for keys in job.keys]
    sizes = [KeyValues.size(n, k, v) for n in tokens]
    message = dk.new_empty(sum(sizes))
    for at, n, flat in zip(_places(job), tokens, message.split(sizes)):  # one message: no copies of parts in between
        part = KeyValues(flat, n, k, v)
        _take(part.k, dk, at)
        _take(part.v, dv, at)
    own = sizes[job.rank]
    pending = job.group.all_to_all_uneven(message, sizes, [own] * job.size)

    return Pending(lambda: [KeyValues(flat, k.shape[1], k, v) for flat in pending.wait().view(job.size, own)])


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(1, order)


def _unordered(x: Tensor, order: Tensor | None) -> Tensor:
    """What `_ordered` has moved, back in place."""
    return x if order is None else torch.empty_like(x).index_copy_(1, order, x)
