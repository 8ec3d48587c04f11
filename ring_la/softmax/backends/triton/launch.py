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
    """Tiles that meet, in one call a block however many documents and runs there are.

    Attributes:
        dearest_first: whether the dearest tiles of all heads start first, rather than head by head.
        in_place: whether a block is put together with those before it as it is computed, rather than in a pass of its
            own.
    """

    name = "triton"
    sums_wide = False
    knows = frozenset({"softcap", "alibi_slopes", "dropout_p"})

    dearest_first = in_place = False

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
        before = out.alone() if self.in_place else None
        if before is None:
            o = q.new_empty(*q.shape[:3], v.shape[3])
            lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        else:
            o, lse = before[0][:, met.rows], before[1][:, :, met.rows]
        block = Launcher(scores, met.pair, (q, k, v, o), lse, self.dearest_first)
        block.over_queries(kernels.forward, table.FORWARD, q, k, v, o, lse, ADD=before is not None)
        if before is None:
            out.add(o, lse, met.rows)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        from . import kernels

        met = plan.trimmed(pair)
        if met is None:
            return
        q, do, k, v = (dense(t) for t in (x.q[:, met.rows], x.do[:, met.rows], k[:, met.keys], v[:, met.keys]))
        lse, delta = _alike(x.lse[:, :, met.rows], x.delta[:, :, met.rows])
        block = Launcher(scores, met.pair, (q, k, v, do), lse, self.dearest_first)
        inputs = (q, k, v, do, lse, delta)
        dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k, v))
        block.over_keys(kernels.backward_keys, table.BACKWARD_KEYS, *inputs, dk, dv)
        out.dk.add(dk, met.keys)
        out.dv.add(dv, met.keys)
        before = out.dq.alone() if self.in_place else None
        dq = torch.empty_like(q, memory_format=torch.contiguous_format) if before is None else before[:, met.rows]
        block.over_queries(
            kernels.backward_queries, table.BACKWARD_QUERIES, *inputs, dq, ADD=before is not None,
            d_rows=dq.stride(0) // dq.stride(1),
        )  # fmt: skip
        if before is None:
            out.dq.add(dq, met.rows)


class TritonInPlace(TritonBackend):
    """The same kernels for many blocks of uneven work: packed documents and windows on a ring. Its last programs are
    the cheapest of all heads, so that a block does not end with a GPU half idle, and no pass over memory follows.

    It has not run on a GPU yet: a call takes it only where it names it.
    """

    name = "triton_in_place"
    dearest_first = in_place = True

    def suits(self, ask: Ask) -> bool:
        return False


class Launcher:
    """One block's launches, and the arguments that its three kernels have in common.

    Args:
        tensors: q, k, v, and o or a gradient with its strides. lse: or what else has a number a row, with its strides.
        dearest_first: in which order programs start.
    """

    def __init__(
        self,
        scores: Scores,
        pair: Pair,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor,
        dearest_first: bool = False,
    ) -> None:
        self.scores, self.pair, self.dearest_first = scores, pair, dearest_first
        (self.q, self.k, self.v, self.o), self.lse = tensors, lse

    def over_queries(
        self, kernel: Any, settings: dict[int, table.TileSettings], *tensors: Tensor, ADD: bool, d_rows: int = 0
    ) -> None:
        """Launch one program for each tile of queries of a head. ADD, d_rows: see the kernels."""
        how = self._settings(settings)
        lists = plan.of_queries(self.pair, how.rows, how.keys)
        grid = -(-self.q.shape[1] // how.rows), self.q.shape[0] * self.q.shape[2]
        self._launch(kernel, grid, how, lists, tensors, d_rows, ADD=ADD)

    def over_keys(self, kernel: Any, settings: dict[int, table.TileSettings], *tensors: Tensor) -> None:
        """Launch one program for each tile of keys of a key head."""
        how = self._settings(settings)
        lists = plan.of_keys(self.pair, how.rows, how.keys)
        grid = -(-self.k.shape[1] // how.keys), self.q.shape[0] * self.k.shape[2]
        self._launch(kernel, grid, how, lists, tensors)

    def _settings(self, settings: dict[int, table.TileSettings]) -> table.TileSettings:
        return table.settings(settings, max(map(_padded, (self.q.shape[3], self.v.shape[3]))), self.q.dtype)

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        how: table.TileSettings,
        lists: plan.TileLists,
        tensors: tuple[Tensor, ...],
        d_rows: int = 0,
        **more: Any,
    ) -> None:
        from ....kernels.runtime.launch import launch

        s, widths = self.scores, (self.q.shape[3], self.v.shape[3])
        bk, bv = map(_padded, widths)
        launch(
            kernel, grid[::-1] if self.dearest_first else grid, *tensors, *lists, *self._common(lists, d_rows),
            BM=how.rows, BN=how.keys, BK=bk, BV=bv, FULL_K=bk == widths[0], FULL_V=bv == widths[1],
            CAP=s.softcap > 0, ALIBI=s.alibi_slopes is not None, DROP=s.dropout_p > 0,
            LEFT=s.left is not None, RIGHT=s.right is not None,
            PRECISION="ieee" if self.q.dtype == torch.float32 else "tf32", DEAREST=self.dearest_first, **more,
            num_warps=how.warps, num_stages=how.stages, tensors="any",
        )  # fmt: skip

    def _common(self, lists: plan.TileLists, d_rows: int) -> list:
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
            self.lse.stride(1), d_rows,
            *(stride for x in (q, k, v, self.o) for stride in x.stride()[:3]),
            q.shape[3], v.shape[3],
        ]  # fmt: skip


def _alike(lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Both ``[B, H, T]`` as kernels read them: heads at one stride, the same of both."""
    strides = lse.stride(1) * lse.shape[1], lse.stride(1), 1
    return (lse, delta) if lse.stride() == delta.stride() == strides else (lse.contiguous(), delta.contiguous())


def _padded(width: int) -> int:
    """Columns of a tile that holds `width`."""
    return max(16, 1 << (width - 1).bit_length())


def _signed(x: int) -> int:
    """The low 32 bits as a signed number, so that the kernels' argument has one type."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x
