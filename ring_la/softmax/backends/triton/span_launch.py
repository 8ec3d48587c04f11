"""The kernels of spans as a backend: what they do not know goes to the general ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...geometry import Pair
from ...merging import Gradients, Partial
from ...merging.parts import dense
from ...scores import Scores
from ..backend import Ask, QueryRows
from . import plan, spans, table
from .launch import TritonBackend, padded
from .table import TileSettings

if TYPE_CHECKING:
    from ....kernels.runtime.triton_version import TensorDescriptor


class TritonSpans(TritonBackend):
    """Documents, windows and order by spans of keys; other scores and orders by `TritonBackend`."""

    name = "triton_spans"

    def suits(self, ask: Ask) -> bool:
        """By name only: these kernels have not been timed on a GPU."""
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        from . import span_kernels

        met = plan.trimmed(pair)
        if met is None:
            return
        if not spans.simple(met.pair, scores):
            return super().forward(q, k, v, scores, pair, out)
        q, k, v = (dense(x) for x in (q[:, met.rows], k[:, met.keys], v[:, met.keys]))
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        call = SpanCall(met.pair, scores, q, k, v, o)
        call.over_queries(span_kernels.forward, table.SPANS_FORWARD, o, lse)
        out.add(o, lse, met.rows)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        from . import span_kernels

        met = plan.trimmed(pair)
        if met is None:
            return
        if not spans.simple(met.pair, scores):
            return super().backward(x, k, v, scores, pair, out)
        q, do, k, v = (dense(t) for t in (x.q[:, met.rows], x.do[:, met.rows], k[:, met.keys], v[:, met.keys]))
        lse, delta = (t[:, :, met.rows].contiguous() for t in (x.lse, x.delta))
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        call = SpanCall(met.pair, scores, q, k, v, do)
        call.over_keys(span_kernels.backward_keys, table.SPANS_KEYS, lse, delta, dk, dv)
        call.over_queries(span_kernels.backward_queries, table.SPANS_QUERIES, do, lse, delta, dq)
        out.add(dq, dk, dv, met.rows, met.keys)


class SpanCall:
    """One block's launches.

    Args:
        o: o, or a gradient with its strides.
    """

    def __init__(self, pair: Pair, scores: Scores, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        self.pair, self.scores, self.q, self.k, self.v, self.o = pair, scores, q, k, v, o

    def over_queries(self, kernel: Any, settings: dict[int, TileSettings], *more: Tensor) -> None:
        """One program for each item of queries and head; the keys' tiles come by descriptors."""
        how, q, k, v = self._settings(settings), self.q, self.k, self.v
        work, bulk = spans.of_queries(self.pair, how.rows, how.keys), described(k, v)
        walked = [_tiles(x, how.keys) for x in (k, v)] if bulk else [k, v]
        self._launch(kernel, how, work, q.shape[0] * q.shape[2], [q, *walked, *more], bulk)

    def over_keys(self, kernel: Any, settings: dict[int, TileSettings], *more: Tensor) -> None:
        """One program for each item of keys and key head; the queries' tiles come by descriptors."""
        how, q, k, v, do = self._settings(settings), self.q, self.k, self.v, self.o
        lse, delta, *results = more
        work, bulk = spans.of_keys(self.pair, how.rows, how.keys), described(q, do) and q.shape[1] % spans.BOUNDARY == 0
        walked = [q, do, lse, delta]
        if bulk:
            walked = [*(_tiles(x, how.rows) for x in (q, do)), *(_numbers(x, how.rows) for x in (lse, delta))]
        self._launch(kernel, how, work, k.shape[0] * k.shape[2], [walked[0], k, v, *walked[1:], *results], bulk)

    def _settings(self, settings: dict[int, TileSettings]) -> TileSettings:
        return table.settings(settings, max(map(padded, (self.q.shape[3], self.v.shape[3]))), self.q.dtype)

    def _launch(self, kernel: Any, how: TileSettings, work: spans.Work, heads: int, first: list, bulk: bool) -> None:
        from ....kernels.runtime.launch import launch

        q, k, v = self.q, self.k, self.v
        (K, V), items = (q.shape[3], v.shape[3]), len(work.items)
        bk, bv, apart = padded(K), padded(V), 0 if self.pair.reach.windowed else min(spans.APART, heads)
        launch(
            kernel, (items * heads,), *first, work.items, work.low, work.high, self.scores.scale,
            q.shape[1], k.shape[1], q.shape[2], k.shape[2], items, apart,
            *(stride for x in (q, k, v, self.o) for stride in x.stride()[:3]), K, V,
            BM=how.rows, BN=how.keys, BK=bk, BV=bv, FULL_K=bk == K, FULL_V=bv == V,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", BULK=bulk,
            num_warps=how.warps, num_stages=how.stages, tensors="any",
        )  # fmt: skip


def described(*tensors: Tensor) -> bool:
    """Whether tiles of these are loaded by descriptors: a copy engine fetches them, and writes zeros outside."""
    x = tensors[0]
    if x.is_cuda and (x.dtype == torch.float32 or torch.cuda.get_device_capability(x.device)[0] < 9):
        return False
    return all(
        t.data_ptr() % 16 == 0 and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:3])
        for t in tensors
    )


def _tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """What loads so many rows of one head of ``x [B, T, H, D]``."""
    from ....kernels.runtime.triton_version import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, padded(x.shape[3])])


def _numbers(x: Tensor, count: int) -> TensorDescriptor:
    """What loads so many numbers of ``x``, contiguous, wherever they begin."""
    from ....kernels.runtime.triton_version import TensorDescriptor

    return TensorDescriptor(x, [x.numel()], [1], [count])
