"""Partial results put together in one pass over memory: Triton kernels and their launchers.

Parts are the results of single blocks, in the inputs' dtype or wide; each is read once, and what they make is written
once, accumulated in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.runtime.launch import launch
from .parts import Part, dense

MOST = 6
"""Parts that one launch takes."""
ROWS = 16
LENGTHS = ("T", *(f"{end}{i}" for i in range(MOST) for end in "se"))
"""Arguments that change from call to call (T, and where each part starts and ends): no kernel is compiled for them."""


@triton.jit(do_not_specialize=LENGTHS)
def _merge(
    O, L, parts, lses, strides, T, s0, e0, s1, e1, s2, e2, s3, e3, s4, e4, s5, e5,
    H, V, O_b, O_t, O_h, L_b, L_h,
    N: tl.constexpr, R: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    starts, ends = (s0, s1, s2, s3, s4, s5), (e0, e1, e2, e3, e4, e5)
    rows, bh = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    columns, inside, row = tl.arange(0, BV), rows < T, rows.to(tl.int64)
    top = tl.full((R,), -float("inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    o = tl.zeros((R, BV), tl.float32)
    for i in tl.static_range(N):
        has = inside & (rows >= starts[i]) & (rows < ends[i])
        own = row - starts[i]
        at = lses[i] + (b * H + h) * (ends[i] - starts[i]) + own
        lse = tl.load(at, mask=has, other=-float("inf"))
        x_at = parts[i] + b * strides[i][0] + own[:, None] * strides[i][1] + h * strides[i][2] + columns[None, :]
        x = tl.load(x_at, mask=has[:, None] & (columns < V)[None, :], other=0.0).to(tl.float32)
        new = tl.maximum(top, lse)
        safe = tl.where(new == -float("inf"), 0.0, new)
        keep, take = tl.exp(top - safe), tl.exp(lse - safe)
        o = o * keep[:, None] + x * take[:, None]
        total = total * keep + take
        top = new
    some = total > 0
    o = o / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    tl.store(L + b * L_b + h * L_h + row, lse, mask=inside)
    into = O + b * O_b + h * O_h + row[:, None] * O_t + columns[None, :]
    tl.store(into, o.to(O.dtype.element_ty), mask=inside[:, None] & (columns < V)[None, :])


def merge(o: Tensor, lse: Tensor, parts: Sequence[Part]) -> None:
    """Write what at most MOST `parts` make, each of some rows, into ``o [B, T, H, V]`` and fp32 ``lse [B, H, T]``.

    The last dimension of both is contiguous. A part may be what is written to.
    """
    B, T, H, V = o.shape
    if not o.numel():
        return
    tensors, lses = tuple(dense(p.x) for p in parts), tuple(p.lse.contiguous() for p in parts)
    launch(
        _merge, (triton.cdiv(T, ROWS), B * H),
        o, lse, tensors, lses, tuple(x.stride()[:3] for x in tensors), T, *_spans(parts), H, V,
        *o.stride()[:3], *lse.stride()[:2],
        N=len(parts), R=ROWS, BV=triton.next_power_of_2(V), num_warps=4, tensors="any",
    )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def _add(
    OUT, parts, strides, T, s0, e0, s1, e1, s2, e2, s3, e3, s4, e4, s5, e5,
    H, D, OUT_b, OUT_t, OUT_h, N: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    starts, ends = (s0, s1, s2, s3, s4, s5), (e0, e1, e2, e3, e4, e5)
    pair, b = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1).to(tl.int64)
    t, h, columns = pair // H, (pair % H)[:, None], tl.arange(0, BD)[None, :]
    total = tl.zeros((R, BD), tl.float32)
    for i in tl.static_range(N):
        has = (t < T) & (t >= starts[i]) & (t < ends[i])
        own = (t - starts[i]).to(tl.int64)[:, None]
        at = parts[i] + b * strides[i][0] + own * strides[i][1] + h * strides[i][2] + columns
        total += tl.load(at, mask=has[:, None] & (columns < D), other=0.0).to(tl.float32)
    into = OUT + b * OUT_b + t.to(tl.int64)[:, None] * OUT_t + h * OUT_h + columns
    tl.store(into, total.to(OUT.dtype.element_ty), mask=(t < T)[:, None] & (columns < D))


def add(out: Tensor, parts: Sequence[Part]) -> None:
    """Write the sum of at most MOST `parts`, each of some rows, into ``out [B, T, H, D]`` (D contiguous)."""
    B, T, H, D = out.shape
    if not out.numel():
        return
    tensors = tuple(dense(p.x) for p in parts)
    launch(
        _add, (triton.cdiv(T * H, ROWS), B),
        out, tensors, tuple(x.stride()[:3] for x in tensors), T, *_spans(parts), H, D, *out.stride()[:3],
        N=len(parts), R=ROWS, BD=triton.next_power_of_2(D), num_warps=4, tensors="any",
    )  # fmt: skip


def _spans(parts: Sequence[Part]) -> list[int]:
    """Where each part starts and ends, for as many as a launch takes."""
    spans = [end for p in parts for end in (p.start, p.stop)]
    return spans + [0] * (2 * MOST - len(spans))


@triton.jit(do_not_specialize=("T",))
def _row_sums(DO, O, OUT, T, H, V, DO_b, DO_t, DO_h, O_b, O_t, O_h, R: tl.constexpr, BV: tl.constexpr):
    rows, bh = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    b, h, columns, row = (bh // H).to(tl.int64), bh % H, tl.arange(0, BV)[None, :], rows.to(tl.int64)[:, None]
    mask = (rows < T)[:, None] & (columns < V)
    do = tl.load(DO + b * DO_b + row * DO_t + h * DO_h + columns, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(O + b * O_b + row * O_t + h * O_h + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + bh.to(tl.int64) * T + rows, tl.sum(do * o, 1), mask=rows < T)


def row_sums(do: Tensor, o: Tensor) -> Tensor:
    """``do · o`` of each row, fp32 ``[B, H, T]``, of tensors ``[B, T, H, V]``."""
    B, T, H, V = o.shape
    do, o = dense(do), dense(o)
    out = o.new_empty(B, H, T, dtype=torch.float32)
    if out.numel():
        launch(
            _row_sums, (triton.cdiv(T, ROWS), B * H), do, o, out, T, H, V, *do.stride()[:3], *o.stride()[:3], R=ROWS,
            BV=triton.next_power_of_2(V), num_warps=4, tensors="any",
        )  # fmt: skip
    return out
