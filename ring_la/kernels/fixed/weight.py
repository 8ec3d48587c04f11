"""A weight's gradient ``Σ dyᵀ x``: the product of every block of 64 tokens, added exactly, in one launch.

A block's product P is added to a sum that begins at C = 1.5 · 2²³ grids, so that fp32 rounds it to a multiple of the
grid and nothing else is ever rounded: the last bit of P is set, so that it never lies between two multiples, and the
sum's own bits cannot decide (Demmel and Nguyen 2015, "Parallel reproducible summation"). By Cauchy and Schwarz P is
below the product of its columns' norms; the largest norm of any block on any rank decides the grid:

    grid[n, k] = 2⁻¹⁵ · above_y[n] · above_x[k],      at most 64 blocks before the sum is read off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fixed.product import unit_of
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.spans.table import cdiv

BLOCK, GROUP = 64, 64
"""Tokens of a block, and blocks that are added before the sum is read off."""
TILE = 128
START = 1.5 * 2**8
"""C in units of ``above_y · above_x``."""


@triton.jit(do_not_specialize=("D",))
def norms_kernel(x, places, out, D, UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """The largest norm of a column of a block, so far: floats ≥ 0 stand in the order of their bits."""
    D *= UNIT
    start, stop = tl.load(places + tl.program_id(0) * 2), tl.load(places + tl.program_id(0) * 2 + 1)
    t, d = start + tl.arange(0, BT), tl.program_id(1) * BD + tl.arange(0, BD)
    at = t.to(tl.int64)[:, None] * D + d[None, :]
    y = tl.abs(tl.load(x + at, (t < stop)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32))
    top = tl.max(y, 0)
    q = y / tl.where(top > 0, top, 1.0)[None, :]
    norm = top * tl.sqrt(tl.sum(q * q, 0)) * 1.01
    norm = tl.where(tl.sum((y < float("inf")).to(tl.int32), 0) == BT, norm, float("inf"))  # a NaN, too
    tl.atomic_max(out + d, norm.to(tl.int32, bitcast=True), d < D)


@triton.jit(do_not_specialize=("COUNT", "N", "K"))
def weight_kernel(
    dy, x, places, above_y, above_x, out, COUNT, N, K, UN: tl.constexpr, UK: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, START: tl.constexpr, ADD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [N, K]`` over COUNT blocks; ADD: to what is there, in fp64."""
    N *= UN
    K *= UK
    across = (K + BK - 1) // BK
    n = tl.program_id(0) // across * BN + tl.arange(0, BN)
    k = tl.program_id(0) % across * BK + tl.arange(0, BK)
    t = tl.arange(0, BT)
    top_y = tl.load(above_y + n, n < N, other=1.0)
    top_x = tl.load(above_x + k, k < K, other=1.0)
    acc = (top_y * START)[:, None] * top_x[None, :]
    for i in range(0, COUNT):
        start, stop = tl.load(places + i * 2), tl.load(places + i * 2 + 1)
        rows = start + t
        left = tl.load(
            dy + rows.to(tl.int64)[None, :] * N + n[:, None], (rows < stop)[None, :] & (n < N)[:, None], other=0.0
        )
        right = tl.load(
            x + rows.to(tl.int64)[:, None] * K + k[None, :], (rows < stop)[:, None] & (k < K)[None, :], other=0.0
        )
        part = tl.dot(left, right, input_precision=PREC)
        acc += (part.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    total = acc - (top_y * START)[:, None] * top_x[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ADD:
        tl.store(out + at, tl.load(out + at, inside, other=0.0) + total.to(tl.float64), inside)
    else:
        tl.store(out + at, total.to(out.dtype.element_ty), inside)


def largest_norms(x: Tensor, places: Tensor) -> Tensor:
    """Above the norms of all columns of all blocks ``[D]``, fp32, of ``x [rows, D]``; inf where one is not finite."""
    x, D = aligned(x), x.shape[-1]
    out = torch.zeros(D, dtype=torch.int32, device=x.device)
    if len(places):
        launch(
            norms_kernel,
            (len(places), cdiv(D, TILE)),
            x,
            places,
            out,
            D // unit_of(D),
            UNIT=unit_of(D),
            BT=BLOCK,
            BD=TILE,
            num_warps=4,
        )
    return out.view(torch.float32)


def block_sums(
    dy: Tensor, x: Tensor, places: Tensor, above_y: Tensor, above_x: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """``Σ dyᵀ x [N, K]`` over this rank's blocks of ``dy [rows, N]`` and ``x [rows, K]``: fp64 multiples of the grid,
    or rounded once to `dtype`, for whom nothing is to be added to it.

    Args:
        places: int32 ``[blocks, 2]``, where each starts and ends. above_y, above_x: fp32 powers of two above
            `largest_norms` on all ranks.
    """
    dy, x, above_y, above_x = map(aligned, (dy, x, above_y, above_x))
    N, K = dy.shape[-1], x.shape[-1]
    once = dtype is not None and 0 < len(places) <= GROUP
    out = dy.new_empty(N, K, dtype=dtype) if once else torch.zeros(N, K, dtype=torch.float64, device=dy.device)
    un, uk = unit_of(N), unit_of(K)
    for i in range(0, len(places), GROUP):
        some = places[i : i + GROUP]
        launch(
            weight_kernel, (cdiv(N, TILE) * cdiv(K, TILE),), dy, x, some, above_y, above_x, out, len(some),
            N // un, K // uk, UN=un, UK=uk, BT=BLOCK, BN=TILE, BK=TILE, START=START, ADD=not once, PREC="ieee",
            num_warps=8, num_stages=7,  # of which places and what is loaded by them take three
        )  # fmt: skip
    return out if once or dtype is None else out.to(torch.float32).to(dtype)
