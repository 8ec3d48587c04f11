"""All keys to all ranks, and backwards all queries: nothing is summed over ranks, so sums have one order.

dq of a row is formed where the row is, from all keys it sees; dk and dv where the key is, from all rows that see it.
Scores are thus formed twice backwards, and queries travel once; `Canonical` says in which blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import QueryRows
from ..backends.canonical import Canonical
from ..geometry import Pair, Tokens
from ..merging import Gradients, Sum, wide
from .all_gather import KeyGather, _ordered, gather_keys
from .job import AttentionJob


class CanonicalGather(KeyGather):
    """`KeyGather`, without sums over ranks."""

    name = "canonical"

    def backward(self, job: AttentionJob, x: QueryRows, k: Tensor, v: Tensor) -> Gradients:
        assert isinstance(job.backend, Canonical)
        assert job.all_keys is not None
        all_k, all_v = gather_keys(job, k, v).wait()
        tokens, order = job.rows[0].kept(_joined, lambda: _joined(job.rows), *job.rows)
        rows, grads = _all_rows(job, x, order), Gradients.of(x.q, k, v)
        reach = job.scores.reach
        grads.dq.add(job.backend.query_gradients(x, all_k, all_v, job.scores, job.against(job.all_keys)))
        dk, dv = job.backend.key_gradients(rows, k, v, job.scores, Pair(tokens, job.keys[job.rank], reach))
        return Gradients(grads.dq, _sum(k, dk), _sum(v, dv))


def _joined(rows: tuple[Tokens, ...]) -> tuple[Tokens, Tensor | None]:
    """The rows of all ranks, in the order of the sequence."""
    return Tokens.joined(rows).fewest_runs()


def _sum(like: Tensor, grad: Tensor) -> Sum:
    out = Sum.like(like)
    out.add(grad)
    return out


def _all_rows(job: AttentionJob, x: QueryRows, order: Tensor | None) -> QueryRows:
    """The rows of all ranks."""
    if job.size == 1:
        return x
    assert x.delta is not None
    assert job.group is not None
    (B, T, H, K), V = x.q.shape, x.do.shape[-1]
    narrow = [t.mT[..., None] for t in (x.lse, x.delta)]  # [B, T, H, 1]
    own = torch.cat([t.to(wide(x.q.dtype)) for t in (x.q, x.do, *narrow)], -1)
    padded = own.new_zeros(B, max(len(r) for r in job.rows), H, K + V + 2)
    padded[:, :T] = own
    parts = [part[:, : len(r)] for part, r in zip(job.group.all_gather(padded).wait(), job.rows)]
    q, do, lse, delta = _ordered(torch.cat(parts, 1), order).split([K, V, 1, 1], -1)
    q, do = q.to(x.q.dtype), do.to(x.do.dtype)
    return QueryRows(
        q, do, do, *(t[..., 0].mT.contiguous() for t in (lse, delta))
    )  # o is not read: delta stands for it
