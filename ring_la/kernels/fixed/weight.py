"""A weight's gradient ``Σ dyᵀ x``: the product of every block of 64 tokens, added exactly, in one launch.

A block's product P is added to a sum that begins at C = 1.5 · 2²³ grids, so that fp32 rounds it to a multiple of the
grid and nothing else is ever rounded: the last bit of P is set, so that it never lies between two multiples, and the
sum's own bits cannot decide (Demmel and Nguyen 2015, "Parallel reproducible summation"). By Cauchy and Schwarz P is
below the product of its columns' norms; the largest norm of any block on any rank decides the grid:

    grid[n, k] = 2⁻¹⁵ · above_y[n] · above_x[k],      at most 128 blocks before the sum is read off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fixed import weight_hopper
from ring_la.kernels.fixed.grid import power_above
from ring_la.kernels.fixed.product import BY_DESCRIPTOR, unit_of
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor
from ring_la.kernels.spans.table import cdiv

BLOCK, GROUP = 64, 128
"""Tokens of a block, and blocks that are added before the sum is read off."""
TILE, WIDE = (64, 128), 128
"""Of dW, from benchmarks.tuning.fixed on an H200: two programs a multiprocessor; columns of a program for norms."""
BY_CUDA = False
"""Whether `weight_hopper` makes sums over full blocks where it can."""
DESCRIBED = 64, 128
"""Of dW where tiles come by descriptor."""
START = 1.5 * 2**8
"""C in units of ``above_y · above_x``."""
FEW = 512
"""Blocks whose sum has at most 2²⁴ grids, so that fp32 holds it."""


@triton.jit
def block_norms(x, places, out, tile, D, BT: tl.constexpr, BD: tl.constexpr):
    """The largest norm of a column of a block, so far: floats ≥ 0 stand in the order of their bits."""
    start, stop = tl.load(places + tl.program_id(0) * 2), tl.load(places + tl.program_id(0) * 2 + 1)
    t, d = start + tl.arange(0, BT), tile * BD + tl.arange(0, BD)
    at = t.to(tl.int64)[:, None] * D + d[None, :]
    y = tl.load(x + at, (t < stop)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32) * 2.0**30
    norm = tl.sqrt(tl.sum(y * y, 0)) * (1.01 * 2.0**-30)
    norm = tl.where(norm < float("inf"), norm, float("inf"))  # a NaN, too
    tl.atomic_max(out + d, norm.to(tl.int32, bitcast=True), d < D)


@triton.jit(do_not_specialize=("N", "K"))
def norms_kernel(
    dy, x, places, norms_y, norms_x, N, K, UN: tl.constexpr, UK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Of both."""
    N *= UN
    K *= UK
    tiles = (N + BD - 1) // BD
    tile = tl.program_id(1)
    if tile < tiles:
        block_norms(dy, places, norms_y, tile, N, BT, BD)
    else:
        block_norms(x, places, norms_x, tile - tiles, K, BT, BD)


@triton.jit(do_not_specialize=("COUNT", "N", "K"))
def weight_kernel(
    dy, x, places, norms_y, norms_x, out, COUNT, N, K, UN: tl.constexpr, UK: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, START: tl.constexpr, ADD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [N, K]`` over COUNT blocks; ADD: to what is there, fp32 or fp64."""
    N *= UN
    K *= UK
    across = (K + BK - 1) // BK
    n = tl.program_id(0) // across * BN + tl.arange(0, BN)
    k = tl.program_id(0) % across * BK + tl.arange(0, BK)
    t = tl.arange(0, BT)
    above_y = power_above(tl.load(norms_y + n, n < N, other=1.0)) * START
    above_x = power_above(tl.load(norms_x + k, k < K, other=1.0))
    acc = above_y[:, None] * above_x[None, :]
    of_y, of_x = n[:, None] + t[None, :] * N, t[:, None] * K + k[None, :]  # within a block: small numbers
    for i in range(0, COUNT):
        start = tl.load(places + i * 2)
        rows = tl.load(places + i * 2 + 1) - start
        left = tl.load(dy + start.to(tl.int64) * N + of_y, (t < rows)[None, :] & (n < N)[:, None], other=0.0)
        right = tl.load(x + start.to(tl.int64) * K + of_x, (t < rows)[:, None] & (k < K)[None, :], other=0.0)
        part = tl.dot(left, right, input_precision=PREC)
        acc += (part.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    total = acc - above_y[:, None] * above_x[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ADD:
        tl.store(out + at, tl.load(out + at, inside, other=0.0) + total.to(out.dtype.element_ty), inside)
    else:
        tl.store(out + at, total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=("COUNT", "N", "K"))
def described_weight_kernel(
    dy, x, places, norms_y, norms_x, out, COUNT, N, K, UN: tl.constexpr, UK: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, START: tl.constexpr, ADD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """`weight_kernel` over full blocks, with tiles of dy and x by descriptor."""
    N *= UN
    K *= UK
    across = (K + BK - 1) // BK
    row, column = tl.program_id(0) // across * BN, tl.program_id(0) % across * BK
    n, k = row + tl.arange(0, BN), column + tl.arange(0, BK)
    above_y = power_above(tl.load(norms_y + n, n < N, other=1.0)) * START
    above_x = power_above(tl.load(norms_x + k, k < K, other=1.0))
    acc = above_y[:, None] * above_x[None, :]
    for i in range(0, COUNT):
        start = tl.load(places + i * 2)
        part = tl.dot(dy.load([start, row]).T, x.load([start, column]), input_precision=PREC)
        acc += (part.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    total = acc - above_y[:, None] * above_x[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ADD:
        total = tl.load(out + at, inside, other=0.0) + total.to(out.dtype.element_ty)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


def largest_norms(dy: Tensor, x: Tensor, places: Tensor) -> tuple[Tensor, int]:
    """Bounds of the norms of all columns of all blocks of ``dy [rows, N]``, and from the place returned on of
    ``x [rows, K]``, fp32; inf where one is not finite."""
    dy, x, N, K = aligned(dy), aligned(x), dy.shape[-1], x.shape[-1]
    behind = cdiv(N, 4) * 4  # on a boundary of 16 bytes
    out = torch.zeros(behind + K, dtype=torch.int32, device=x.device)
    un, uk = unit_of(N), unit_of(K)
    if len(places):
        launch(
            norms_kernel, (len(places), cdiv(N, WIDE) + cdiv(K, WIDE)), dy, x, places, out, out[behind:],
            N // un, K // uk, UN=un, UK=uk, BT=BLOCK, BD=WIDE, num_warps=4,
        )  # fmt: skip
    return out.view(torch.float32), behind


class BlockPlaces(NamedTuple):
    """Where blocks start and end, int32 ``[n, 2]``: those of 64 tokens, and shorter ones."""

    full: Tensor
    ragged: Tensor

    def __len__(self) -> int:
        return len(self.full) + len(self.ragged)


def block_sums(
    dy: Tensor, x: Tensor, places: BlockPlaces, norms_y: Tensor, norms_x: Tensor, dtype: torch.dtype
) -> Tensor:
    """``Σ dyᵀ x [N, K]`` over this rank's blocks of ``dy [rows, N]`` and ``x [rows, K]``: multiples of the grid in
    fp64, or in fp32 if all ranks together have no more than FEW blocks; in another dtype they are rounded, for whom
    nothing is to be added to them. norms_y, norms_x: `largest_norms` on all ranks, fp32."""
    dy, x, N, K = aligned(dy), aligned(x), dy.shape[-1], x.shape[-1]
    of = [some[i : i + GROUP] for some in places for i in range(0, len(some), GROUP)]
    if not of:
        return torch.zeros(N, K, dtype=dtype, device=dy.device)
    kept = dtype
    if len(of) > 1 and dtype not in (torch.float32, torch.float64):
        kept = torch.float32 if len(places) <= FEW else torch.float64
    out, by_cuda = dy.new_empty(N, K, dtype=kept), BY_CUDA and not weight_hopper.reason_against(dy, x)
    for i, some in enumerate(of):
        full = i * GROUP < len(places.full)
        add = weight_hopper.add_blocks if full and by_cuda else _add_blocks
        add(dy, x, some, norms_y, norms_x, out, i > 0, full)
    return out if kept == dtype else out.to(torch.float32).to(dtype)


def _add_blocks(
    dy: Tensor, x: Tensor, places: Tensor, norms_y: Tensor, norms_x: Tensor, out: Tensor, add: bool, full: bool
) -> None:
    """At most GROUP blocks, all of them `full` or not; `add`: to what is there."""
    N, K = out.shape
    un, uk = unit_of(N), unit_of(K)
    described = BY_DESCRIPTOR and full and N % 16 == K % 16 == 0
    (bn, bk), stages = (DESCRIBED, 5) if described else (TILE, 7)
    given = (_by_block(dy, bn), _by_block(x, bk)) if described else (dy, x)
    launch(
        described_weight_kernel if described else weight_kernel, (cdiv(N, bn) * cdiv(K, bk),), *given, places,
        norms_y, norms_x, out, len(places), N // un, K // uk, UN=un, UK=uk, BT=BLOCK, BN=bn, BK=bk, START=START,
        ADD=add, PREC="ieee", num_warps=4, num_stages=stages,  # of which places take some
    )  # fmt: skip


def _by_block(x: Tensor, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [BLOCK, columns])
