"""``Σ dyᵀ x`` over full blocks, where tensor cores themselves add to a sum that begins at C = 1.5 · 2²³ grids.

A tensor core multiplies 16 tokens, shifts their products to the largest exponent met, adds, and cuts the sum down to
fp32 (Khattak and Mikaitis 2025, "Accurate models of NVIDIA tensor cores"). That exponent is always C's, and the sum
always a multiple of the grid, so that what 16 tokens add is a multiple of the grid that they alone decide, whatever
came before. Cuts go towards zero: the first half of each block's tokens meets C, the second −C, and the means of the
cuts cancel. `adds_exactly` finds out whether a device does all that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.errors import UnsupportedError
from ring_la.kernels.fixed.bounds import BLOCK, Bounds, bound_above, bounds_of
from ring_la.kernels.fixed.product import unit_of
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor
from ring_la.kernels.spans.table import cdiv

HALF = 32
"""Tokens of a block that meet a C of one sign."""
START = 1.5 * 2**1
"""C in units of ``above_y · above_x``, which are 2²² grids."""
LEAST = tl.constexpr(1.5 * 2.0**-100)
"""C, at least."""


class WeightTile(NamedTuple):
    """How a kernel is launched: rows and columns of dW, halves of blocks an iteration, warps, pipeline stages."""

    rows: int = 128
    columns: int = 256
    halves: int = 1
    num_warps: int = 8
    num_stages: int = 8


TILE = WeightTile()


@triton.jit
def start_of(acc):
    """C, or −C, of a sum that began there: it has C's exponent, so that C need not be kept."""
    return ((acc.to(tl.int32, bitcast=True) & -0x800000) | 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def store_sum(out, total, inside):
    """In out's dtype, of fp64 by way of fp32 if it is a smaller one."""
    if out.dtype.element_ty != tl.float64:
        total = total.to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=("COUNT", "ROWS", "N", "K"))
def weight_sum_kernel(
    dy, x, places, norms_y, shares_y, norms_x, shares_x, before, out, COUNT, ROWS, N, K, UN: tl.constexpr,
    UK: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    START: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [N, K]`` over COUNT full blocks of ROWS rows; ADD: to `before`, in its dtype."""
    N *= UN
    K *= UK
    across = (K + BK - 1) // BK
    row, column = tl.program_id(0) // across * BN, tl.program_id(0) % across * BK
    n, k = row + tl.arange(0, BN), column + tl.arange(0, BK)
    above_y = bound_above(norms_y, shares_y, n, n < N)
    acc = START * above_y[:, None] * bound_above(norms_x, shares_x, k, k < K)[None, :]
    acc = tl.where(acc < LEAST, LEAST, acc)
    for half in tl.static_range(2):
        for i in range(0, COUNT, HALVES):
            for j in tl.static_range(HALVES):
                start = tl.load(places + (i + j) * 2, i + j < COUNT, other=ROWS) + half * HALF  # outside: zeros
                acc = tl.dot(dy.load([start, row]).T, x.load([start, column]), acc)
        if half == 0:
            acc -= 2 * start_of(acc)
    total = acc - start_of(acc)
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ADD:
        total = tl.load(before + at, inside, other=0.0) + total.to(before.dtype.element_ty)
    store_sum(out + at, total, inside)


def add_full_blocks(dy: Tensor, x: Tensor, places: Tensor, bounds: Bounds, before: Tensor | None, out: Tensor) -> None:
    """``out [N, K] = before + Σ dyᵀ x`` over blocks of 64 rows from ``places [:, 0]`` on, at most GROUP of `bounds`;
    N and K multiples of 16."""
    (N, K), behind = out.shape, bounds.behind
    un, uk = unit_of(N), unit_of(K)
    described = (
        TensorDescriptor(t, list(t.shape), [t.shape[1], 1], [HALF, n]) for t, n in ((dy, TILE.rows), (x, TILE.columns))
    )
    launch(
        weight_sum_kernel, (cdiv(N, TILE.rows) * cdiv(K, TILE.columns),), *described, places,
        bounds.norms, bounds.shares, bounds.norms[behind:], bounds.shares[behind:], out if before is None else before,
        out, len(places), len(dy), N // un, K // uk, UN=un, UK=uk, HALF=HALF, HALVES=TILE.halves, BN=TILE.rows,
        BK=TILE.columns, START=START, ADD=before is not None, num_warps=TILE.num_warps, num_stages=TILE.num_stages,
    )  # fmt: skip


# -- whether a device adds so --------------------------------------------------------------------------------------

_found: dict[tuple[torch.device, torch.dtype, WeightTile], bool] = {}


def adds_exactly(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether blocks' sums do not depend on their order, nor on how they are cut into launches, and are as near the
    product as the cuts allow: tried once a process on numbers that tell (`_tried`), about 0.1 s.

    Raises:
        UnsupportedError: it was not tried before a step is captured.
    """
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    kind = (device, dtype, TILE)
    if kind not in _found:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("capture", "a deterministic step that has run before", "a new dtype", "Run it once")
        _found[kind] = _tried(*_drawn(dtype, device))
    return _found[kind]


def _drawn(dtype: torch.dtype, device: torch.device, blocks: int = 48) -> tuple[Tensor, Tensor]:
    """dy ``[rows, 272]`` and x ``[rows, 528]``: more than a tile, blocks of all sizes, small integers whose products
    lie between multiples of the grid, zeros, and a block that is all of one sign."""
    rng = torch.Generator(device).manual_seed(0)

    def draw(columns: int) -> Tensor:
        x = torch.randn(blocks, BLOCK, columns, generator=rng, device=device)
        x[1::3] = (x[1::3] * 2).round()
        x[::4] *= torch.exp2(-torch.arange(len(x[::4]), device=device).float())[:, None, None]
        x[5, :, ::2] = 0
        x[6] = x[6].abs()
        return x.flatten(0, 1).to(dtype)

    return draw(272), draw(528)


def _tried(dy: Tensor, x: Tensor) -> bool:
    starts = torch.arange(0, len(dy), BLOCK, dtype=torch.int32, device=dy.device)
    places = torch.stack([starts, starts + BLOCK], 1)
    bounds = bounds_of(dy, x, places)

    def sums(places: Tensor) -> Tensor:
        out = torch.empty(dy.shape[1], x.shape[1], device=dy.device)
        add_full_blocks(dy, x, places.contiguous(), bounds, None, out)
        return out

    whole, singly = sums(places), sum(sums(place[None]) for place in places)
    orders = places.flip(0), torch.cat([places[1::2], places[::2]]), torch.cat([places[7:], places[:7]])
    if not all(torch.equal(other, whole) for other in (singly, *(sums(order) for order in orders))):
        return False
    exact = dy.double().T @ x.double()
    error = (whole.double() - exact).square().mean().sqrt()
    return bool(error < (exact.bfloat16().double() - exact).square().mean().sqrt())
