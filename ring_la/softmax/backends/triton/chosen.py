"""Launching the kernels for queries that choose their keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels import sizes
from ...geometry import Pair
from ...merging import Gradients, Partial, has_triton
from ...merging.parts import dense
from ...scores import Scores
from ..backend import Ask, QueryRows
from ..chosen import ChosenBackend
from . import launch as softmax

WIDEST = 256
"""Of keys and values apart."""
WIDEST_OF_BLOCKS = 128
"""The same of the form for blocks."""
WIDEST_SHARED = 512, 64
"""Columns of values that are a key's first columns, and columns behind them."""


LARGE_BLOCK, FEW_KEY_HEADS = 64, 8
"""Keys of a block, and query heads a key head, from which queries side by side are faster than one a program."""


def fastest(ask: Ask) -> str:
    """The kernel that a call on a GPU takes which names none. `python -m benchmarks.chosen`, one H200, 8,192 tokens,
    forward and backward in ms: with latents torch 670, triton 56, triton_sorted 39; with blocks of 64 and 16 heads a
    key head 793, 34, 37, and triton_blocks 7.6."""
    if ask.groups == 1 and ask.width > ask.value_width:
        return "triton_sorted"
    wide, narrow = max(ask.width, ask.value_width) > WIDEST_OF_BLOCKS, ask.heads < FEW_KEY_HEADS * ask.groups
    if ask.block < LARGE_BLOCK or wide or narrow or ask.dtype == torch.float32:
        return "triton"
    return "triton_blocks"


class TritonChosen(ChosenBackend):
    """A program for every query. Gradients of keys are summed by atomics, in an order that varies."""

    name = "triton"

    def unsupported(self, ask: Ask) -> str:
        if ask.device.type != "cuda" and not softmax.interpreted:
            return "tensors are not on a CUDA device"
        if not has_triton():
            return "triton is not installed"
        if ask.dtype == torch.float64:
            return "it has no fp64"
        behind = ask.width - ask.value_width
        shared = ask.groups == 1 and ask.value_width <= WIDEST_SHARED[0] and 0 <= behind <= WIDEST_SHARED[1]
        if max(ask.width, ask.value_width) > WIDEST and not shared:
            return f"it needs K and V up to {WIDEST}, not {ask.width} and {ask.value_width}"
        return super().unsupported(ask)

    def suits(self, ask: Ask) -> bool:
        """Where it was measured to be the fastest, and sums may be formed in any order."""
        repeatable = ask.repeatable or torch.are_deterministic_algorithms_enabled()
        return ask.device.type == "cuda" and not repeatable and fastest(ask) == self.name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        from . import chosen_kernels

        q, k, v, shared = dense(q), dense(k), dense(v), shared_memory(k, v)
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        self._launch(chosen_kernels.forward, (q, k, v, o), (lse,), scores, pair, shared)
        out.add(o, lse)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        from . import chosen_kernels

        q, k, v, do, shared = dense(x.q), dense(k), dense(v), dense(x.do), shared_memory(k, v)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = dk[..., : v.shape[3]] if shared else torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        more = x.lse.contiguous(), x.delta.contiguous(), dq, dk, dv
        self._launch(chosen_kernels.backward, (q, k, v, do), more, scores, pair, shared, (dq, dk, dv))
        out.dq.add(dq)
        out.dk.add(dk)
        if not shared:
            out.dv.add(dv)

    def _launch(
        self,
        kernel: Any,
        tensors: tuple[Tensor, ...],
        more: tuple[Tensor, ...],
        scores: Scores,
        pair: Pair,
        shared: bool,
        grads: tuple[Tensor, ...] = (),
    ) -> None:
        from ....kernels.runtime.launch import launch

        (q, k, v, _), c, places = tensors, dense(self.chosen), pair.keys.places
        (B, Tq, H, K), Hk, V = q.shape, k.shape[2], v.shape[3]
        G, (left, right) = H // Hk, pair.reach
        width = V if shared else K
        bg, options = _tile(G, width, q.dtype, bool(grads))
        widths = dict(KW=width, RW=K - width, VW=V)  # constants going back
        numbers = tuple(s for x in grads for s in x.stride()[:3]) if grads else tuple(widths.values())
        (q_pos, q_doc, _), (k_pos, k_doc, _) = pair.rows.columns, pair.keys.columns
        constants: dict[str, Any] = widths if grads else {}
        launch(
            kernel, (Tq, -(-G // bg) * B * Hk), *tensors, *more, c, places, q_pos, q_doc, k_pos, k_doc,
            scores.scale, left or 0, right or 0, Tq, c.shape[3], len(places), G, c.shape[2],
            *c.stride()[:3], *(s for x in tensors for s in x.stride()[:3]), *numbers, **constants,
            H=H, BG=bg, BK=sizes.width(width), BR=sizes.width(K - width) if K > width else 1,
            BV=sizes.width(V), BLOCK=scores.block, SHARED=shared, LEFT=left is not None, RIGHT=right is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **options, tensors="any",
        )  # fmt: skip


def _tile(G: int, width: int, dtype: torch.dtype, back: bool) -> tuple[int, dict[str, Any]]:
    """Heads of a program, and the other numbers of a tile."""
    if back:
        return min(sizes.width(G), 16), dict(BN=32, num_warps=8 if width > 128 else 4, num_stages=1)
    few = dtype == torch.float32 or width > 128
    stages = 2 if width <= WIDEST else 1
    return min(64, sizes.width(G)), dict(BN=32 if few else 64, num_warps=8 if width > WIDEST else 4, num_stages=stages)


def shared_memory(k: Tensor, v: Tensor) -> bool:
    """Whether values are the first columns of keys, in the same memory."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.numel() > 0
