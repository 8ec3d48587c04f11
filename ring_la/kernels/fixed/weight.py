"""A weight's gradient ``Σ dyᵀ x``: the product of every block of 64 tokens, added exactly, in a few launches.

A block's product P is added to a sum that begins at C = 1.5 · 2²³ grids, so that fp32 rounds it to a multiple of the
grid and nothing else is ever rounded: the last bit of P is set, so that it never lies between two multiples, and the
sum's own bits cannot decide (Demmel and Nguyen 2015, "Parallel reproducible summation"). The grid leaves room for
what `bounds` allows any GROUP blocks to add up to:

    grid[n, k] = 2⁻²² · above_y[n] · above_x[k].

Full blocks go by `weight_sum`, where tensor cores do the same themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fixed.bounds import BLOCK, GROUP, Bounds, bound_above
from ring_la.kernels.fixed.product import unit_of
from ring_la.kernels.fixed.weight_sum import START, add_full_blocks, adds_exactly, store_sum
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.sizes import cdiv

TILE = (64, 128)
"""Of dW, from benchmarks.tuning.fixed on an H200: two programs a multiprocessor."""
FEW = 512
"""Blocks whose sum has at most 2²⁴ grids, so that fp32 holds it."""
NARROW, RUN = 64, 8
"""Tiles of dW, at most, that are too few for a GPU, and blocks of a program then."""


@triton.jit(do_not_specialize=("COUNT", "N", "K"))
def weight_kernel(
    dy, x, places, norms_y, shares_y, norms_x, shares_x, before, out, COUNT, N, K, UN: tl.constexpr, UK: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RUN: tl.constexpr, START: tl.constexpr, ADD: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [N, K]`` over COUNT blocks; ADD: to `before`, in its dtype. RUN: over so many of them, added to
    what is there, which is exact and so has no order."""
    N *= UN
    K *= UK
    across = (K + BK - 1) // BK
    n = tl.program_id(0) // across * BN + tl.arange(0, BN)
    k = tl.program_id(0) % across * BK + tl.arange(0, BK)
    t = tl.arange(0, BT)
    start_y = bound_above(norms_y, shares_y, n, n < N) * START
    above_x = bound_above(norms_x, shares_x, k, k < K)
    acc = start_y[:, None] * above_x[None, :]
    of_y, of_x = n[:, None] + t[None, :] * N, t[:, None] * K + k[None, :]  # within a block: small numbers
    first, last = tl.program_id(1) * RUN, COUNT
    if RUN:
        last = tl.minimum(first + RUN, COUNT)
    for i in range(first, last):
        start = tl.load(places + i * 2)
        rows = tl.load(places + i * 2 + 1) - start
        left = tl.load(dy + start.to(tl.int64) * N + of_y, (t < rows)[None, :] & (n < N)[:, None], other=0.0)
        right = tl.load(x + start.to(tl.int64) * K + of_x, (t < rows)[:, None] & (k < K)[None, :], other=0.0)
        part = tl.dot(left, right, input_precision=PREC)
        acc += (part.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
    total = acc - start_y[:, None] * above_x[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if RUN:
        tl.atomic_add(out + at, total.to(out.dtype.element_ty), inside)
    else:
        if ADD:
            total = tl.load(before + at, inside, other=0.0) + total.to(before.dtype.element_ty)
        store_sum(out + at, total, inside)


class BlockPlaces(NamedTuple):
    """Where blocks start and end, int32 ``[n, 2]``: those of 64 tokens, and shorter ones.

    Attributes:
        run: whether those of 64 stand one behind the other.
    """

    full: Tensor
    ragged: Tensor
    run: bool = False

    def __len__(self) -> int:
        return len(self.full) + len(self.ragged)


def block_sums(dy: Tensor, x: Tensor, places: BlockPlaces, bounds: tuple[Bounds, Bounds], dtype: torch.dtype) -> Tensor:
    """``Σ dyᵀ x [N, K]`` over this rank's blocks of ``dy [rows, N]`` and ``x [rows, K]``, of these bounds: multiples of
    the grid in fp64, or in fp32 if all ranks together have no more than FEW blocks; in another dtype they are rounded,
    for whom nothing is to be added to them."""
    dy, x, N, K = aligned(dy), aligned(x), dy.shape[-1], x.shape[-1]
    wide = dtype
    if dtype not in (torch.float32, torch.float64):
        wide = torch.float32 if len(places) <= FEW else torch.float64
    whole: Tensor | None = None
    full, rest, run = places
    if len(full) and N % 16 == K % 16 == 0 and adds_exactly(dy.dtype, dy.device):
        whole = dy.new_empty(N, K, dtype=wide if len(rest) else dtype)
        add_full_blocks(dy, x, full, run, bounds, whole, wide)
        full = full[:0]
    of = [some[i : i + GROUP] for some in (full, rest) for i in range(0, len(some), GROUP)]
    for i, some in enumerate(of):
        if cdiv(N, TILE[0]) * cdiv(K, TILE[1]) <= NARROW:
            whole = dy.new_zeros(N, K, dtype=wide) if whole is None else whole
            _add_blocks(dy, x, some, bounds, None, whole, RUN)
            continue
        out = dy.new_empty(N, K, dtype=dtype if i == len(of) - 1 else wide)
        _add_blocks(dy, x, some, bounds, whole, out, 0)
        whole = out
    if whole is None:
        return torch.zeros(N, K, dtype=dtype, device=dy.device)
    return whole if whole.dtype == dtype else whole.to(torch.float32).to(dtype)


def _add_blocks(
    dy: Tensor, x: Tensor, places: Tensor, bounds: tuple[Bounds, Bounds], before: Tensor | None, out: Tensor, run: int
) -> None:
    """At most GROUP blocks, added to `before`; by `run` of them, to `out` itself."""
    (N, K), (bn, bk) = out.shape, TILE
    un, uk = unit_of(N), unit_of(K)
    launch(
        weight_kernel, (cdiv(N, bn) * cdiv(K, bk), cdiv(len(places), run) if run else 1), dy, x, places,
        *bounds[0], *bounds[1], out if before is None else before, out, len(places), N // un, K // uk, UN=un, UK=uk,
        BT=BLOCK, BN=bn, BK=bk, RUN=run, START=START, ADD=before is not None, PREC="ieee", num_warps=4,
        num_stages=7,  # of which places take some
    )  # fmt: skip
