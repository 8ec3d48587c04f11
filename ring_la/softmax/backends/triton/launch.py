"""Launching the Triton kernels: block sizes, strides, and the backend of the common protocol."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...merge import Gradients, Partial, has_triton
from ...scores import Scores
from ...tokens import Tokens
from ..backend import Ask, Backend
from . import plan as planning

BLOCKS = {32: (128, 64, 4), 64: (128, 64, 4), 128: (128, 64, 8), 256: (64, 32, 8)}
"""Widest of K and V: rows, keys and warps of a tile. Chosen by register count, not yet measured."""
WIDEST = 256
STAGES = 2
interpreted = False
"""Set by tests that run the kernels in Triton's interpreter, on the CPU."""


class TritonBackend(Backend):
    """Tiles that meet, in one call a block however many documents and runs there are."""

    name = "triton"

    def refuses(self, ask: Ask) -> str:
        if ask.device.type != "cuda" and not interpreted:
            return "tensors are not on a CUDA device"
        if not has_triton():
            return "triton is not installed"
        if ask.dtype == torch.float64:
            return "it has no fp64"
        if max(ask.width, ask.value_width) > WIDEST:
            return f"it needs K and V up to {WIDEST}, not {ask.width} and {ask.value_width}"
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, out: Partial) -> None:
        from . import kernels

        q, k, v = (_dense_rows(x) for x in (q, k, v))
        first = out.empty
        if first:
            o = q.new_empty(*q.shape[:3], v.shape[3])
            lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        else:
            o, lse = out.wide()
        call = _Call(scores, q, k, v, o, tq, tk)
        lists = call.plan.of_queries
        kernels.forward[call.grid(q)](
            q, k, v, o, lse, *lists, *call.common(lists), **call.constants, MERGE=not first, num_warps=call.warps,
            num_stages=STAGES,
        )  # fmt: skip
        if first:
            out.add(o, lse)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        delta: Tensor,
        scores: Scores,
        tq: Tokens,
        tk: Tokens,
        out: Gradients,
    ) -> None:
        from . import kernels

        q, k, v, do = (_dense_rows(x) for x in (q, k, v, do))
        call = _Call(scores, q, k, v, do, tq, tk)
        results = lse.contiguous(), delta.contiguous()
        for kernel, of, into, grid in (
            (kernels.backward_keys, call.plan.of_keys, (out.dk, out.dv), call.grid(k)),
            (kernels.backward_queries, call.plan.of_queries, (out.dq,), call.grid(q)),
        ):
            own = [x if x.is_contiguous() else x.contiguous() for x in into]
            kernel[grid](
                q, k, v, do, *results, *own, *of, *call.common(of), **call.constants, num_warps=call.warps,
                num_stages=STAGES,
            )  # fmt: skip
            for x, y in zip(into, own):
                if x is not y:
                    x.copy_(y)


class _Call:
    """What the three kernels have in common."""

    def __init__(self, scores: Scores, q: Tensor, k: Tensor, v: Tensor, o: Tensor, tq: Tokens, tk: Tokens) -> None:
        self.scores, self.q, self.k, self.v, self.o = scores, q, k, v, o
        self.key_width, self.value_width = q.shape[3], v.shape[3]
        bk, bv = (max(16, 1 << (w - 1).bit_length()) for w in (self.key_width, self.value_width))
        self.bm, self.bn, self.warps = BLOCKS[max(32, bk, bv)]
        if q.dtype == torch.float32:
            self.bm, self.bn = self.bm // 2, self.bn // 2
        self.plan = planning.plan(scores, tq, tk, self.bm, self.bn)
        self.constants: dict[str, Any] = dict(
            BM=self.bm,
            BN=self.bn,
            BK=bk,
            BV=bv,
            FULL_K=bk == self.key_width,
            FULL_V=bv == self.value_width,
            CAP=scores.softcap > 0,
            ALIBI=scores.alibi_slopes is not None,
            DROP=scores.dropout_p > 0,
            LEFT=scores.left is not None,
            RIGHT=scores.right is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )

    def grid(self, side: Tensor) -> tuple[int, int]:
        """Tiles of the rows of `side`, for each of its heads."""
        size = self.bn if side is self.k else self.bm
        return -(-side.shape[1] // size), side.shape[0] * side.shape[2]

    def common(self, lists: planning.TileLists) -> list:
        """The arguments that follow the lists, in the kernels' order."""
        s, q, k, v = self.scores, self.q, self.k, self.v
        none = self.plan.q[0]  # any tensor, where the kernel reads none
        slopes = none if s.alibi_slopes is None else s.alibi_slopes.float().contiguous()
        heads = none
        if s.dropout_p:
            heads = torch.arange(q.shape[2], device=q.device) if s.heads is None else s.heads
            heads = heads.to(torch.int32)
        keep_scale, threshold = 1 / (1 - s.dropout_p), int(s.dropout_p * 2**32)
        return [
            *self.plan.q, *self.plan.k, slopes, heads,
            s.scale, s.softcap, s.left or 0, s.right or 0, keep_scale, *map(_signed, (threshold, s.seed, s.seed >> 32)),
            q.shape[1], k.shape[1], q.shape[2], k.shape[2], lists.tiles.shape[1], 1 if slopes is none else len(slopes),
            *(stride for x in (q, k, v, self.o) for stride in x.stride()[:3]),
            self.key_width, self.value_width,
        ]  # fmt: skip


def _signed(x: int) -> int:
    """The low 32 bits as a signed number, so that the kernels' argument has one type."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


def _dense_rows(x: Tensor) -> Tensor:
    """`x` with neighbouring numbers in its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
