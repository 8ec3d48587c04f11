"""``Σ dyᵀ x`` over full blocks, where tensor cores themselves add to a sum that begins at C = 1.5 · 2²³ grids.

A tensor core multiplies 16 tokens, shifts their products to the largest exponent met, adds, and cuts the sum down to
fp32 (Khattak and Mikaitis 2025, "Accurate models of NVIDIA tensor cores"). That exponent is always C's, and the sum
always a multiple of the grid, so that what 16 tokens add is a multiple of the grid that they alone decide, whatever
came before. Cuts go towards zero: the first half of each block's tokens meets C, the second −C, and the means of the
cuts cancel. `adds_exactly` finds out whether a device does all that.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.errors import UnsupportedError
from ring_la.kernels import gpu
from ring_la.kernels.fixed.bounds import BLOCK, GROUP, Bounds, bound_above, bounds_of
from ring_la.kernels.fixed.product import unit_of
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor
from ring_la.kernels.sizes import cdiv

HALF = 32
"""Tokens of a block that meet a C of one sign."""
START = 1.5 * 2**1
"""C in units of ``above_y · above_x``, which are 2²² grids."""
LEAST = tl.constexpr(1.5 * 2.0**-100)
"""C, at least."""
ADDED, MOST_CHUNKS = 2048, 16
"""Numbers of a split tile that a program adds up, and chunks of it at most."""
STARTING, ADDING = 0.03, 0.0004
"""What a wave of chunks and a chunk cost beside their blocks, of a whole tile's time; estimates."""


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


@triton.jit
def sum_of_blocks(
    dy, x, places, start, first, last, row, column, ROWS, HALF: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """``Σ dyᵀ x`` of blocks `first` to `last`, at most GROUP: multiples of the grid. RUN: they stand one behind the
    other."""
    acc = start
    origin = tl.load(places)
    for half in tl.static_range(2):
        for i in range(first, last, HALVES):
            for j in tl.static_range(HALVES):
                if RUN:
                    at = tl.where(i + j < last, origin + (i + j) * (2 * HALF), ROWS) + half * HALF  # outside: zeros
                else:
                    at = tl.load(places + (i + j) * 2, i + j < last, other=ROWS) + half * HALF
                acc = tl.dot(dy.load([at, row]).T, x.load([at, column]), acc)
        if half == 0:
            acc -= 2 * start_of(acc)
    return acc - start_of(acc)


@triton.jit(do_not_specialize=("COUNT", "ROWS", "N", "K", "WHOLE", "SPLIT", "PART", "SKIP"))
def weight_sum_kernel(
    dy, x, places, norms_y, shares_y, norms_x, shares_x, kept, out, COUNT, ROWS, N, K, WHOLE, SPLIT, PART, SKIP,
    UN: tl.constexpr, UK: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, START: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A tile of ``out [N, K]`` over COUNT full blocks, of ROWS rows; of the SPLIT tiles behind the first WHOLE a sum
    of PART blocks, to the program's place in `kept`, where what GROUP blocks add up to waits, too."""
    N *= UN
    K *= UK
    across = (K + BK - 1) // BK
    tile, first, last = tl.program_id(0), 0, COUNT
    if tile >= WHOLE:
        first = (tile - WHOLE) // SPLIT * PART
        last = tl.minimum(first + PART, COUNT)
        tile = WHOLE + (tile - WHOLE) % SPLIT
    row, column = tile // across * BN, tile % across * BK
    n, k = row + tl.arange(0, BN), column + tl.arange(0, BK)
    keep = kept + (tl.program_id(0) - SKIP).to(tl.int64) * (BN * BK)
    keep = keep + tl.arange(0, BN)[:, None] * BK + tl.arange(0, BK)[None, :]
    for begin in range(first, last, GROUP):
        above_y = bound_above(norms_y, shares_y, n, n < N)
        start = START * above_y[:, None] * bound_above(norms_x, shares_x, k, k < K)[None, :]
        start = tl.where(start < LEAST, LEAST, start)
        end = tl.minimum(begin + GROUP, last)
        total = sum_of_blocks(dy, x, places, start, begin, end, row, column, ROWS, HALF, HALVES, RUN)
        total = total.to(kept.dtype.element_ty)
        if begin > first:
            total += tl.load(keep)
        if (end < last) | (tl.program_id(0) >= WHOLE):
            tl.store(keep, total)
            tl.debug_barrier()  # other threads may read it
        else:
            at = n.to(tl.int64)[:, None] * K + k[None, :]
            store_sum(out + at, total, (n < N)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=("N", "K", "WHOLE", "SPLIT", "CHUNKS"))
def weight_parts_kernel(
    kept, out, N, K, WHOLE, SPLIT, CHUNKS, BN: tl.constexpr, BK: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """RUN numbers of a split tile, from its CHUNKS sums."""
    i = tl.program_id(1) * RUN + tl.arange(0, RUN)
    total = tl.zeros([RUN], kept.dtype.element_ty)
    for chunk in range(CHUNKS):
        total += tl.load(kept + (chunk * SPLIT + tl.program_id(0)).to(tl.int64) * (BN * BK) + i)
    across = (K + BK - 1) // BK
    tile = WHOLE + tl.program_id(0)
    n, k = tile // across * BN + i // BK, tile % across * BK + i % BK
    store_sum(out + n.to(tl.int64) * K + k, total, (n < N) & (k < K))


class Division(NamedTuple):
    """How dW's tiles are divided among programs: `whole` ones, each a program's, and `split` ones, of which `chunks`
    programs add `part` blocks each. Sums are exact, so that it changes no bit."""

    whole: int
    split: int
    chunks: int
    part: int


@functools.lru_cache(maxsize=4096)
def division(tiles: int, count: int, slots: int) -> Division:
    """So that programs of `count` blocks leave as few of so many slots idle at the end as may be."""
    whole = tiles // slots * slots
    split = tiles - whole

    def cost(chunks: int) -> float:
        """In units of a whole tile's time, with what begins, ends and adds up a chunk."""
        return cdiv(split * chunks, slots) * (1 / chunks + STARTING) + (chunks > 1) * split * chunks * ADDING

    chunks = min(range(1, min(MOST_CHUNKS, count) + 1), key=cost) if split and count > 1 else 1
    if chunks == 1:
        return Division(tiles, 0, 0, count)
    part = cdiv(count, chunks)
    return Division(whole, split, cdiv(count, part), part)


def add_full_blocks(
    dy: Tensor, x: Tensor, places: Tensor, run: bool, bounds: tuple[Bounds, Bounds], out: Tensor, wide: torch.dtype
) -> None:
    """``out [N, K] = Σ dyᵀ x`` over blocks of 64 rows from ``places [:, 0]`` on, N and K multiples of 16; `run`:
    whether these stand one behind the other; `wide`: what holds their sum exactly."""
    (N, K), count = out.shape, len(places)
    un, uk = unit_of(N), unit_of(K)
    described = (
        TensorDescriptor(t, list(t.shape), [t.shape[1], 1], [HALF, n]) for t, n in ((dy, TILE.rows), (x, TILE.columns))
    )
    whole, split, chunks, part = division(
        cdiv(N, TILE.rows) * cdiv(K, TILE.columns), count, gpu.multiprocessors(dy.device)
    )
    skip = 0 if count > GROUP else whole
    kept = torch.empty(whole - skip + split * chunks, TILE.rows * TILE.columns, dtype=wide, device=dy.device)
    launch(
        weight_sum_kernel, (whole + split * chunks,), *described, places, *bounds[0], *bounds[1],
        *filled(kept if len(kept) else None, by=out), out, count,
        len(dy), N // un, K // uk, whole, split, part, skip, UN=un, UK=uk, HALF=HALF, HALVES=TILE.halves, BN=TILE.rows,
        BK=TILE.columns, GROUP=GROUP, START=START, RUN=run, num_warps=TILE.num_warps, num_stages=TILE.num_stages,
    )  # fmt: skip
    if split:
        launch(
            weight_parts_kernel, (split, TILE.rows * TILE.columns // ADDED), kept[whole - skip :], out, N, K, whole,
            split, chunks, BN=TILE.rows, BK=TILE.columns, RUN=ADDED, num_warps=4,
        )  # fmt: skip


# -- whether a device adds so --------------------------------------------------------------------------------------

_found: dict[tuple[torch.device, torch.dtype, WeightTile], bool] = {}


def adds_exactly(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether blocks' sums do not depend on their order, nor on how they are cut into launches, and are as near the
    product as the cuts allow: tried once a process on numbers that tell (`_tried`), about 0.1 s.

    Raises:
        UnsupportedError: it was not tried before a step is captured.
    """
    if not gpu.is_hopper(device):
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
    bounds = bounds_of(dy, places), bounds_of(x, places)

    def sums(places: Tensor, run: bool = False) -> Tensor:
        out = torch.empty(dy.shape[1], x.shape[1], device=dy.device)
        add_full_blocks(dy, x, places.contiguous(), run, bounds, out, torch.float32)
        return out

    whole, singly = sums(places, True), torch.stack([sums(place[None]) for place in places]).sum(0)
    orders = places.flip(0), torch.cat([places[1::2], places[::2]]), torch.cat([places[7:], places[:7]])
    if not all(torch.equal(other, whole) for other in (singly, *(sums(order) for order in orders))):
        return False
    exact = dy.double().T @ x.double()
    error = (whole.double() - exact).square().mean().sqrt()
    return bool(error < (exact.bfloat16().double() - exact).square().mean().sqrt())
