"""What no sum of GROUP blocks' products ``dyᵀ x`` exceeds, from norms of columns, in any order of the blocks.

By Cauchy and Schwarz such a sum is below ``√Σ‖dy‖² · √Σ‖x‖²`` over its blocks, and so below ``b_y · b_x`` with

    b = min(√GROUP · m, √Σ‖·‖²),      m the largest norm of a block, the sum over all blocks of all ranks.

The sum is taken of ``‖·‖²/m²`` rounded up to 2⁻²⁰, which whole numbers hold. Either b may be the smaller one: many
blocks alike, or one beside which the others are small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fixed.grid import power_above
from ring_la.kernels.fixed.product import unit_of
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.sizes import cdiv

BLOCK, GROUP = 64, 128
"""Tokens of a block, and blocks that are added before a sum is read off."""
WIDE, WARPS, ROWS = 256, 1, 16
"""Columns of a program, its warps, and rows that it meets at a time."""
NARROW, MANY = 32, 64
"""Of sums over blocks, columns of a program and blocks that it meets at a time."""
ROOT = tl.constexpr(11.32)
"""Above √GROUP."""


class Bounds(NamedTuple):
    """Of a tensor's columns, over all ranks' blocks: m ``[C]`` fp32 and the sum ``[C]`` fp64."""

    norms: Tensor
    shares: Tensor


@triton.jit(do_not_specialize=("D",))
def norms_kernel(
    x, places, out, D, UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Bounds of the norms of a block's columns, a row of ``out [blocks, D]``; inf where one is not finite."""
    D *= UNIT
    start, stop = tl.load(places + tl.program_id(0) * 2), tl.load(places + tl.program_id(0) * 2 + 1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)
    for first in tl.static_range(0, BT, ROWS):
        t = start + first + tl.arange(0, ROWS)
        at = t.to(tl.int64)[:, None] * D + d[None, :]
        y = tl.load(x + at, (t < stop)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32) * 2.0**30
        total += tl.sum(y * y, 0)
    norm = tl.sqrt(total) * (1.01 * 2.0**-30)
    at = out + tl.program_id(0).to(tl.int64) * D + d
    tl.store(at, tl.where(norm < float("inf"), norm, float("inf")), d < D)  # a NaN, too


@triton.jit
def largest_in_columns(norms, d, COUNT, C, BR: tl.constexpr):
    """m of columns `d`, over COUNT rows."""
    m = tl.zeros([d.shape[0]], tl.float32)
    for first in range(0, COUNT, BR):
        i = first + tl.arange(0, BR)
        live = (i < COUNT)[:, None] & (d < C)[None, :]
        m = tl.maximum(m, tl.max(tl.load(norms + i.to(tl.int64)[:, None] * C + d[None, :], live, other=0.0), 0))
    return m


@triton.jit
def shares_in_columns(norms, m, d, COUNT, C, BR: tl.constexpr):
    """``Σ ⌈2²⁰ (norm / m)²⌉`` of columns `d`, over COUNT rows."""
    m = tl.where((m > 0) & (m < float("inf")), m, 1.0)[None, :]
    total = tl.zeros([d.shape[0]], tl.int64)
    for first in range(0, COUNT, BR):
        i = first + tl.arange(0, BR)
        live = (i < COUNT)[:, None] & (d < C)[None, :]
        share = tl.load(norms + i.to(tl.int64)[:, None] * C + d[None, :], live, other=0.0) / m
        share = tl.where(share <= 1.0, share, 1.0)
        total += tl.sum(tl.ceil(share * share * 2.0**20).to(tl.int64), 0)
    return total.to(tl.float64)


@triton.jit(do_not_specialize=("COUNT", "C"))
def shares_kernel(norms, largest, out, COUNT, C, BR: tl.constexpr, BD: tl.constexpr):
    """Shares of what `largest` says."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = tl.load(largest + d, d < C, other=0.0)
    tl.store(out + d, shares_in_columns(norms, m, d, COUNT, C, BR), d < C)


@triton.jit(do_not_specialize=("COUNT", "C"))
def bounds_kernel(norms, largest, shares, COUNT, C, BR: tl.constexpr, BD: tl.constexpr):
    """Both of COUNT rows."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = largest_in_columns(norms, d, COUNT, C, BR)
    tl.store(largest + d, m, d < C)
    tl.store(shares + d, shares_in_columns(norms, m, d, COUNT, C, BR), d < C)


@triton.jit
def bound_above(norms, shares, at, mask):
    """A power of two above b, as `power_above` has it."""
    m = tl.load(norms + at, mask, other=1.0)
    root = tl.sqrt((tl.load(shares + at, mask, other=1.0) * 2.0**-20).to(tl.float32))
    return power_above(m * tl.minimum(root, ROOT))


def norms_of_blocks(x: Tensor, places: Tensor) -> Tensor:
    """Bounds of the norms of all columns of blocks of ``x [rows, C]``, fp32 ``[blocks, C]``; inf where one is not
    finite. places: int32 ``[blocks, 2]``."""
    x, C = aligned(x), x.shape[-1]
    out, unit = torch.empty(len(places), C, device=x.device), unit_of(C)
    if len(places):
        launch(
            norms_kernel, (len(places), cdiv(C, WIDE)), x, places, out, C // unit, UNIT=unit, BT=BLOCK, BD=WIDE,
            ROWS=ROWS, num_warps=WARPS,
        )  # fmt: skip
    return out


def largest_norms(norms: Tensor) -> Tensor:
    """m of these blocks, ``[C]``."""
    return norms.amax(0) if len(norms) else norms.new_zeros(norms.shape[1])


def shares_of(norms: Tensor, largest: Tensor) -> Tensor:
    """The sum of shares of these blocks, whole numbers in fp64 ``[C]``; largest: m of all ranks."""
    out = torch.empty(norms.shape[1], dtype=torch.float64, device=norms.device)
    launch(
        shares_kernel, (cdiv(norms.shape[1], NARROW),), norms, largest, out, len(norms), norms.shape[1],
        BR=MANY, BD=NARROW, num_warps=4,
    )  # fmt: skip
    return out


def bounds_of(x: Tensor, places: Tensor) -> Bounds:
    """`Bounds` where these blocks are all there are."""
    norms = norms_of_blocks(x, places)
    count, C = norms.shape
    largest, shares = norms.new_empty(C), norms.new_empty(C, dtype=torch.float64)
    launch(
        bounds_kernel, (cdiv(C, NARROW),), norms, largest, shares, count, C, BR=MANY, BD=NARROW, num_warps=4,
    )  # fmt: skip
    return Bounds(largest, shares)
