"""Launching the kernels of spans, which fetch tiles by descriptors; which blocks they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from ....kernels import gpu
from ....kernels.sizes import width
from . import spans, table
from .launch import BlockCall, OfSums
from .table import TileSettings

if TYPE_CHECKING:
    from ....kernels.runtime.triton_version import TensorDescriptor

BOUNDARY = 16
"""Bytes: what a descriptor describes begins there, and so does each row of it."""


def fetchable(x: Tensor) -> bool:
    """Whether descriptors can be of it."""
    steps = (stride * x.element_size() for stride in x.stride()[:3])
    return x.numel() > 0 and x.data_ptr() % BOUNDARY == 0 and all(step % BOUNDARY == 0 for step in steps)


class OfSpans(BlockCall):
    """The kernels of spans (`span_kernels`)."""

    options: ClassVar[dict[str, Any]] = {}
    """Of Triton's compiler."""

    @property
    def tried(self) -> bool:
        """Whether they are for such heads: on GPUs of 16 bits a number and K = V without padding."""
        q, K, V = self.q, self.q.shape[3], self.v.shape[3]
        tried = q.element_size() == 2 and K == V == self.width and gpu.copies_tiles(q.device) if q.is_cuda else True
        return max(64, self.width) in table.SPANS_FORWARD and tried

    @property
    def possible(self) -> bool:
        """Whether they do this block: spans are all there is to its scores, and its tiles can be fetched."""
        tensors = self.q, self.k, self.v, self.o
        return self.tried and spans.simple(self.pair, self.scores) and all(map(fetchable, tensors))

    def of_queries(self, how: TileSettings) -> spans.SpanWork:
        """Items of queries, and their walks."""
        return spans.of_queries(self.pair, how.rows, how.keys)

    def of_keys(self, how: TileSettings) -> spans.SpanWork:
        """Items of keys, and their walks."""
        return spans.of_keys(self.pair, how.rows, how.keys)

    def forward(self, o: Tensor, lse: Tensor) -> None:
        """Write o and lse."""
        from . import span_kernels

        self.over_queries(span_kernels.forward, table.SPANS_FORWARD, o, lse)

    def backward(self, lse: Tensor, delta: Tensor, grads: tuple[Tensor, ...], of_sums: OfSums) -> None:
        """Write dq, dk and dv, and the gradients of sums."""
        from ....kernels.runtime.launch import filled
        from . import span_kernels

        dq, dk, dv = grads
        dcq, dck = filled(*(of_sums or (None, None)), by=dq)
        self.over_keys(span_kernels.backward_keys, table.SPANS_KEYS, lse, delta, dk, dv, dck)
        self.over_queries(span_kernels.backward_queries, table.SPANS_QUERIES, self.o, lse, delta, dq, dcq)

    def over_queries(self, kernel: Any, settings: dict[int, TileSettings], *more: Tensor) -> None:
        """One program for each item of queries and head; tiles of keys are fetched."""
        from ....kernels.runtime.launch import filled

        how, q, k, v = table.settings(settings, self.width, self.q.dtype), self.q, self.k, self.v
        work = self.of_queries(how)
        sums = _tiles(self.of_sums[1], how.keys) if self.of_sums else None
        tensors = filled(q, _tiles(k, how.keys), _tiles(v, how.keys), sums, *more)
        self._launch(kernel, how, work, q.shape[0] * q.shape[2], tensors)

    def over_keys(self, kernel: Any, settings: dict[int, TileSettings], *more: Tensor) -> None:
        """One program for each item of keys and key head; tiles of queries are fetched, and their numbers."""
        from ....kernels.runtime.launch import filled

        how, q, k, v = table.settings(settings, self.width, self.q.dtype), self.q, self.k, self.v
        work, (lse, delta, *results) = self.of_keys(how), more
        numbers = [_numbers(x, how.rows) for x in (lse, delta)]
        sums = _tiles(self.of_sums[0], how.rows) if self.of_sums else None
        tensors = filled(_tiles(q, how.rows), k, v, _tiles(self.o, how.rows), sums, *numbers, *results)
        self._launch(kernel, how, work, k.shape[0] * k.shape[2], tensors)

    def _launch(self, kernel: Any, how: TileSettings, work: spans.SpanWork, heads: int, tensors: list) -> None:
        from ....kernels.runtime.launch import launch

        items, (q, k) = len(work.items), (self.q, self.k)
        launch(
            kernel, (items * heads,), *tensors, *work, self.scores.scale,
            q.shape[1], k.shape[1], q.shape[2], k.shape[2], items, _length(q.shape[1]), *self.strides,
            BM=how.rows, BN=how.keys, **self.shared,
            num_warps=how.warps, num_stages=how.stages, tensors="any", **self.options,
        )  # fmt: skip


def _tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """What fetches so many rows of one head of ``x [B, T, H, D]``."""
    from ....kernels.runtime.triton_version import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, width(x.shape[3])])


def _numbers(x: Tensor, count: int) -> TensorDescriptor:
    """What fetches so many numbers of ``x [B, H, T]``, contiguous fp32, from a multiple of `spans.BOUNDARY` on."""
    from ....kernels.runtime.triton_version import TensorDescriptor

    T = x.shape[-1]
    x = x if _length(T) == T else F.pad(x, (0, _length(T) - T))
    return TensorDescriptor(x, [x.numel()], [1], [count])


def _length(T: int) -> int:
    """Numbers of a row of which each begins on a boundary."""
    return -(-T // spans.BOUNDARY) * spans.BOUNDARY
