"""Launching the kernels that go through sorted lists of a query's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels import sizes
from ...geometry import Pair
from ...merging import Gradients, Partial
from ...merging.parts import dense
from ...scores import Scores
from ..backend import QueryRows
from .chosen import TritonChosen, shared_memory

SLOTS = 1 << 26
"""Rows that lists name at once, 4 bytes each."""
SORTED = 2048
"""Of a list that are sorted together."""


class Lists(NamedTuple):
    """What some queries read of the keys at hand.

    Attributes:
        queries: which they are. rows: int32 ``[B, n, heads, slots]``. counts: how many are there, ``[B, n, heads]``.
    """

    queries: slice
    rows: Tensor
    counts: Tensor


class SortedChosen(TritonChosen):
    """Lists first, for some queries at a time, then a program for every query. Gradients of keys are summed by
    atomics, in an order that varies."""

    name = "triton_sorted"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        from . import sorted_kernels

        q, k, v = dense(q), dense(k), dense(v)
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        for x in self._lists(scores, pair):
            of_rows = q[:, x.queries], k, v, o[:, x.queries]
            self._over(sorted_kernels.forward, x, of_rows, (lse[:, :, x.queries],), scores, q.shape[1], ())
        out.add(o, lse)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        from . import sorted_kernels

        assert x.delta is not None  # kernels for chosen keys take it
        q, k, v, do, shared = dense(x.q), dense(k), dense(v), dense(x.do), shared_memory(k, v)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = dk[..., : v.shape[3]] if shared else torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        lse, delta = x.lse.contiguous(), x.delta.contiguous()
        for some in self._lists(scores, pair):
            of_rows, grads = (q[:, some.queries], k, v, do[:, some.queries]), (dq[:, some.queries], dk, dv)
            more = lse[:, :, some.queries], delta[:, :, some.queries], *grads
            self._over(sorted_kernels.backward, some, of_rows, more, scores, q.shape[1], grads)
        out.dq.add(dq)
        out.dk.add(dk)
        if not shared:
            out.dv.add(dv)

    def _lists(self, scores: Scores, pair: Pair) -> Iterator[Lists]:
        from ....kernels.runtime.launch import launch
        from . import sorted_kernels

        chosen, places, (left, right) = dense(self.chosen), pair.keys.places, pair.reach
        (q_pos, q_doc, _), (k_pos, k_doc, _) = pair.rows.columns, pair.keys.columns
        (B, Tq, heads, S), device = chosen.shape, chosen.device
        each = max(1, S * scores.block)
        n = max(16, SLOTS // (B * heads * each) // 16 * 16)  # so that every part begins on a boundary
        for a in range(0, Tq, n):
            some = slice(a, min(a + n, Tq))
            c, t = chosen[:, some], some.stop - some.start
            rows = torch.empty(B, t, heads, each, dtype=torch.int32, device=device)
            count = torch.empty(B, t, heads, dtype=torch.int32, device=device)
            launch(
                sorted_kernels.listed, (t, B * heads),
                rows, count, c, places, q_pos[some], q_doc[some], k_pos, k_doc, left or 0, right or 0, t, S,
                len(places), heads, *c.stride()[:3], BS=min(SORTED, sizes.width(each)), BLOCK=scores.block,
                LEFT=left is not None, RIGHT=right is not None, num_warps=4, tensors="any",
            )  # fmt: skip
            yield Lists(some, rows, count)

    @staticmethod
    def _over(
        kernel: Any,
        x: Lists,
        tensors: tuple[Tensor, ...],
        more: tuple[Tensor, ...],
        scores: Scores,
        Tq: int,
        grads: tuple[Tensor, ...],
    ) -> None:
        """One program for each query of a list and some heads; `Tq` is that of lse."""
        from ....kernels.runtime.launch import launch

        q, k, v, _ = tensors
        (B, n, H, K), Hk, V, shared = q.shape, k.shape[2], v.shape[3], shared_memory(k, v)
        G, width = H // Hk, V if shared else K
        bg, options = _tile(G, width, q.dtype, bool(grads))
        launch(
            kernel, (n, -(-G // bg) * B * Hk), *tensors, *more, x.rows, x.counts,
            scores.scale, Tq, x.rows.shape[3], G, x.rows.shape[2], n,
            *(s for y in tensors for s in y.stride()[:3]), *(s for y in grads for s in y.stride()[:3]),
            KW=width, RW=K - width, VW=V, H=H, BG=bg, BK=sizes.width(width),
            BR=sizes.width(K - width) if K > width else 1, BV=sizes.width(V), SHARED=shared,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **options,
            tensors="any",
        )  # fmt: skip


def _tile(G: int, width: int, dtype: torch.dtype, back: bool) -> tuple[int, dict[str, Any]]:
    """Heads of a program, and the other numbers of a tile. Of four stages the list is one, its keys are two, their
    products one: with three there is room for one tile of keys, which comes when nothing is multiplied."""
    wide, exact = width > 128, dtype == torch.float32
    if back:
        return min(sizes.width(G), 16), dict(BN=32, num_warps=8 if wide else 4, num_stages=1 if exact else 5)
    if exact:
        return min(sizes.width(G), 16), dict(BN=32, num_warps=8 if wide else 4, num_stages=1)
    return min(sizes.width(G), 64), dict(BN=64 if G <= 16 or not wide else 32, num_warps=8 if wide else 4, num_stages=5)
