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

MOST = 6
"""Parts that one launch takes."""
ROWS = 16


@triton.jit(do_not_specialize=("T",))
def _merge(
    O, L, parts, lses, strides, lse_strides, T, H, V,
    O_b, O_t, O_h, L_b, L_h,
    N: tl.constexpr, R: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    rows, bh = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    columns, inside, row = tl.arange(0, BV), rows < T, rows.to(tl.int64)
    mask = inside[:, None] & (columns < V)[None, :]
    top = tl.full((R,), -float("inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    o = tl.zeros((R, BV), tl.float32)
    for i in tl.static_range(N):
        at = lses[i] + b * lse_strides[i][0] + h * lse_strides[i][1] + row * lse_strides[i][2]
        lse = tl.load(at, mask=inside, other=-float("inf"))
        x_at = parts[i] + b * strides[i][0] + row[:, None] * strides[i][1] + h * strides[i][2] + columns[None, :]
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
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
    tl.store(into, o.to(O.dtype.element_ty), mask=mask)


def merge(o: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write what at most MOST `parts` (o, lse) make of the same rows into ``o [B, T, H, V]``, fp32 ``lse [B, H, T]``.

    The last dimension of `lse` and of every o is contiguous. A part may be what is written to.
    """
    B, T, H, V = o.shape
    if not o.numel():
        return
    parts = [(x if x.stride(3) == 1 else x.contiguous(), l) for x, l in parts]
    tensors, lses = zip(*parts)
    _merge[triton.cdiv(T, ROWS), B * H](
        o, lse, tensors, lses, tuple(x.stride()[:3] for x in tensors), tuple(x.stride() for x in lses),
        T, H, V, *o.stride()[:3], *lse.stride()[:2],
        N=len(parts), R=ROWS, BV=triton.next_power_of_2(V), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=("pairs",))
def _add(OUT, parts, strides, pairs, H, D, OUT_b, OUT_t, OUT_h, N: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    pair, b = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1).to(tl.int64)
    t, h, columns = (pair // H).to(tl.int64)[:, None], (pair % H)[:, None], tl.arange(0, BD)[None, :]
    mask = (pair < pairs)[:, None] & (columns < D)
    total = tl.zeros((R, BD), tl.float32)
    for i in tl.static_range(N):
        at = parts[i] + b * strides[i][0] + t * strides[i][1] + h * strides[i][2] + columns
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + b * OUT_b + t * OUT_t + h * OUT_h + columns, total.to(OUT.dtype.element_ty), mask=mask)


def add(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of at most MOST `parts` into ``out [B, T, H, D]``, whose last dimension is contiguous."""
    B, T, H, D = out.shape
    if not out.numel():
        return
    parts = tuple(x if x.stride(3) == 1 else x.contiguous() for x in parts)
    _add[triton.cdiv(T * H, ROWS), B](
        out, parts, tuple(x.stride()[:3] for x in parts), T * H, H, D, *out.stride()[:3],
        N=len(parts), R=ROWS, BD=triton.next_power_of_2(D), num_warps=4,
    )  # fmt: skip


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
    do, o = (x if x.stride(3) == 1 else x.contiguous() for x in (do, o))
    out = o.new_empty(B, H, T, dtype=torch.float32)
    if out.numel():
        _row_sums[triton.cdiv(T, ROWS), B * H](
            do, o, out, T, H, V, *do.stride()[:3], *o.stride()[:3], R=ROWS, BV=triton.next_power_of_2(V), num_warps=4
        )
    return out
