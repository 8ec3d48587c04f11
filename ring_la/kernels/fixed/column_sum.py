"""``Σ`` over rows of numbers rounded to a grid (see `blockwise.sums`): fp64 sums that nothing rounds, in any order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fixed.grid import power_above
from ring_la.kernels.fixed.product import unit_of
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.sizes import cdiv

RUN, WIDE, AT_ONCE = 256, 64, 64
"""Rows and columns of a program, and rows that it meets at a time."""
FEW, NARROW = 1024, 32
"""Rows of which one program does all, and its columns."""


@triton.jit(do_not_specialize=("rows", "D"))
def largest_kernel(x, out, rows, D, UNIT: tl.constexpr, RUN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """The largest magnitude of each column so far, as bits."""
    D *= UNIT
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    top = tl.zeros([BD], tl.float32)
    whole = tl.zeros([BD], tl.int32)
    for first in range(0, RUN, BR):
        i = tl.program_id(0).to(tl.int64) * RUN + first + tl.arange(0, BR)
        live = (i < rows)[:, None] & (d < D)[None, :]
        y = tl.abs(tl.load(x + i[:, None] * D + d[None, :], live, other=0.0).to(tl.float32))
        top = tl.maximum(top, tl.max(y, 0))
        whole += tl.sum((y < float("inf")).to(tl.int32), 0)
    top = tl.where(whole == RUN, top, float("inf"))
    tl.atomic_max(out + d, top.to(tl.int32, bitcast=True), d < D)


@triton.jit(do_not_specialize=("rows", "D"))
def sum_kernel(
    x, largest, out, rows, D, UNIT: tl.constexpr, HEADROOM: tl.constexpr, RUN: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Adds RUN rows of BD columns, on the grid, to out. Sums of multiples of one number are exact: so are atomics."""
    D *= UNIT
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    shift = (power_above(tl.load(largest + d, d < D, other=1.0)).to(tl.float64) * HEADROOM)[None, :]
    total = tl.zeros([BD], tl.float64)
    for first in range(0, RUN, BR):
        i = tl.program_id(0).to(tl.int64) * RUN + first + tl.arange(0, BR)
        live = (i < rows)[:, None] & (d < D)[None, :]
        y = tl.load(x + i[:, None] * D + d[None, :], live, other=0.0).to(tl.float64)
        total += tl.sum((y + shift) - shift, 0)
    tl.atomic_add(out + d, total, d < D)


@triton.jit(do_not_specialize=("rows", "D"))
def whole_sum_kernel(x, out, rows, D, UNIT: tl.constexpr, HEADROOM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Both over all rows of BD columns."""
    D *= UNIT
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    top = tl.zeros([BD], tl.float32)
    wrong = tl.zeros([BD], tl.int32)
    for first in range(0, rows, BR):
        i = (first + tl.arange(0, BR)).to(tl.int64)
        live = (i < rows)[:, None] & (d < D)[None, :]
        y = tl.abs(tl.load(x + i[:, None] * D + d[None, :], live, other=0.0).to(tl.float32))
        top = tl.maximum(top, tl.max(y, 0))
        wrong += tl.sum((y < float("inf")).to(tl.int32) - 1, 0)
    shift = (power_above(tl.where(wrong == 0, top, float("inf"))).to(tl.float64) * HEADROOM)[None, :]
    total = tl.zeros([BD], tl.float64)
    for first in range(0, rows, BR):
        i = (first + tl.arange(0, BR)).to(tl.int64)
        live = (i < rows)[:, None] & (d < D)[None, :]
        y = tl.load(x + i[:, None] * D + d[None, :], live, other=0.0).to(tl.float64)
        total += tl.sum((y + shift) - shift, 0)
    tl.store(out + d, total, d < D)


def whole_sums(x: Tensor, headroom: int) -> Tensor:
    """`column_sums` of ``x [rows, D]`` to which no other rank adds, fp64 ``[D]``."""
    x, (rows, D), unit = aligned(x), x.shape, unit_of(x.shape[1])
    if rows > FEW:
        return column_sums(x, largest_of_columns(x), headroom)
    out = torch.empty(D, dtype=torch.float64, device=x.device)
    if D:
        launch(
            whole_sum_kernel, (cdiv(D, NARROW),), x, out, rows, D // unit, UNIT=unit, HEADROOM=1.5 * 2**headroom,
            BR=64, BD=NARROW, num_warps=4,
        )  # fmt: skip
    return out


def largest_of_columns(x: Tensor) -> Tensor:
    """The largest magnitude in each column of ``x [rows, D]``, fp32 ``[D]``; inf where one is not finite."""
    x, (rows, D), unit = aligned(x), x.shape, unit_of(x.shape[1])
    out = torch.zeros(D, dtype=torch.int32, device=x.device)
    if rows:
        launch(
            largest_kernel, (cdiv(rows, RUN), cdiv(D, WIDE)), x, out, rows, D // unit, UNIT=unit, RUN=RUN, BR=AT_ONCE,
            BD=WIDE, num_warps=4,
        )  # fmt: skip
    return out.view(torch.float32)


def column_sums(x: Tensor, largest: Tensor, headroom: int) -> Tensor:
    """The sums of ``x [rows, D]`` on the grid of ``largest [D]``, `largest_of_columns` of all ranks; fp64 ``[D]``."""
    x, (rows, D), unit = aligned(x), x.shape, unit_of(x.shape[1])
    out = torch.zeros(D, dtype=torch.float64, device=x.device)
    if rows:
        launch(
            sum_kernel, (cdiv(rows, RUN), cdiv(D, WIDE)), x, aligned(largest), out, rows, D // unit, UNIT=unit,
            HEADROOM=1.5 * 2**headroom, RUN=RUN, BR=AT_ONCE, BD=WIDE, num_warps=4,
        )  # fmt: skip
    return out
