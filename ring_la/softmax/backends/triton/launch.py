"""Launching the Triton kernels: block sizes, strides, and the backend of the common protocol."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...geometry import Pair
from ...merging import Gradients, Partial, has_triton
from ...merging.parts import dense
from ...scores import Scores
from ..backend import Ask, AttentionBackend, QueryRows
from . import plan, table

WIDEST = 256
interpreted = False
"""Set by tests that run the kernels in Triton's interpreter, on the CPU."""


class TritonBackend(AttentionBackend):
    """Tiles that meet, in one call a block however many documents and runs there are."""

    name = "triton"
    sums_wide = False
    knows = frozenset({"softcap", "alibi_slopes", "dropout_p"})

    def unsupported(self, ask: Ask) -> str:
        if ask.device.type != "cuda" and not interpreted:
            return "tensors are not on a CUDA device"
        if not has_triton():
            return "triton is not installed"
        if ask.dtype == torch.float64:
            return "it has no fp64"
        if max(ask.width, ask.value_width) > WIDEST:
            return f"it needs K and V up to {WIDEST}, not {ask.width} and {ask.value_width}"
        return super().unsupported(ask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        from . import kernels

        met = plan.trimmed(pair)
        if met is None:
            return
        q, k, v = (dense(x) for x in (q[:, met.rows], k[:, met.keys], v[:, met.keys]))
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        block = Launcher(scores, met.pair, q, k, v, o)
        block.over_queries(kernels.forward, table.FORWARD, q, k, v, o, lse)
        out.add(o, lse, met.rows)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        from . import kernels

        met = plan.trimmed(pair)
        if met is None:
            return
        q, do, k, v = (dense(t) for t in (x.q[:, met.rows], x.do[:, met.rows], k[:, met.keys], v[:, met.keys]))
        block = Launcher(scores, met.pair, q, k, v, do)
        inputs = (q, k, v, do, *(t[:, :, met.rows].contiguous() for t in (x.lse, x.delta)))
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        block.over_keys(kernels.backward_keys, table.BACKWARD_KEYS, *inputs, dk, dv)
        block.over_queries(kernels.backward_queries, table.BACKWARD_QUERIES, *inputs, dq)
        out.add(dq, dk, dv, met.rows, met.keys)


class Launcher:
    """One block's launches, and the arguments that its three kernels have in common.

    Args:
        o: o, or a gradient with its strides.
    """

    def __init__(self, scores: Scores, pair: Pair, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        self.scores, self.pair, self.q, self.k, self.v, self.o = scores, pair, q, k, v, o

    def over_queries(self, kernel: Any, settings: dict[int, table.TileSettings], *tensors: Tensor) -> None:
        """Launch one program for each tile of queries of a head."""
        how = self._settings(settings)
        lists = plan.of_queries(self.pair, how.rows, how.keys)
        grid = -(-self.q.shape[1] // how.rows), self.q.shape[0] * self.q.shape[2]
        self._launch(kernel, grid, how, lists, tensors)

    def over_keys(self, kernel: Any, settings: dict[int, table.TileSettings], *tensors: Tensor) -> None:
        """Launch one program for each tile of keys of a key head."""
        how = self._settings(settings)
        lists = plan.of_keys(self.pair, how.rows, how.keys)
        grid = -(-self.k.shape[1] // how.keys), self.q.shape[0] * self.k.shape[2]
        self._launch(kernel, grid, how, lists, tensors)

    def _settings(self, settings: dict[int, table.TileSettings]) -> table.TileSettings:
        return table.settings(settings, max(map(padded, (self.q.shape[3], self.v.shape[3]))), self.q.dtype)

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        how: table.TileSettings,
        lists: plan.TileLists,
        tensors: tuple[Tensor, ...],
    ) -> None:
        from ....kernels.runtime.launch import launch

        s, widths = self.scores, (self.q.shape[3], self.v.shape[3])
        bk, bv = map(padded, widths)
        launch(
            kernel, grid, *tensors, *lists, *self._common(lists),
            BM=how.rows, BN=how.keys, BK=bk, BV=bv, FULL_K=bk == widths[0], FULL_V=bv == widths[1],
            CAP=s.softcap > 0, ALIBI=s.alibi_slopes is not None, DROP=s.dropout_p > 0,
            LEFT=s.left is not None, RIGHT=s.right is not None,
            PRECISION="ieee" if self.q.dtype == torch.float32 else "tf32",
            num_warps=how.warps, num_stages=how.stages, tensors="any",
        )  # fmt: skip

    def _common(self, lists: plan.TileLists) -> list:
        """The arguments that follow the lists, in the kernels' order."""
        from ....kernels.runtime.launch import filled

        s, q, k, v = self.scores, self.q, self.k, self.v
        slopes = None if s.alibi_slopes is None else s.alibi_slopes.float().contiguous()
        heads = None
        if s.dropout_p:
            heads = torch.arange(q.shape[2], device=q.device) if s.heads is None else s.heads
            heads = heads.to(torch.int32)
        keep_scale, threshold = 1 / (1 - s.dropout_p), int(s.dropout_p * 2**32)
        return [
            *filled(*self.pair.rows.columns, *self.pair.keys.columns, slopes, heads),
            s.scale, s.softcap, s.left or 0, s.right or 0, keep_scale, *map(_signed, (threshold, *s.seed_bits)),
            q.shape[1], k.shape[1], q.shape[2], k.shape[2], lists.tiles.shape[1], 1 if slopes is None else len(slopes),
            *(stride for x in (q, k, v, self.o) for stride in x.stride()[:3]),
            q.shape[3], v.shape[3],
        ]  # fmt: skip


def padded(width: int) -> int:
    """Columns of a tile that holds `width`."""
    return max(16, 1 << (width - 1).bit_length())


def _signed(x: int) -> int:
    """The low 32 bits as a signed number, so that the kernels' argument has one type."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x
