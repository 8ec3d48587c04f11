"""Launches our Triton kernels (triton_kernels.py): which operands arrive how, how many programs, which tiles.

The grid never depends on the sizes: `programs` persistent programs share out the tiles, whose number they read from
the device. Nothing here waits for the device, so a CUDA graph can capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import gpu
from .product import GroupedProduct, aligned, by_matrices, by_rows, installed
from .tuning import FP32, POINTERS, Tiles, tiles_for

PLAN_TILES, PLAN_GROUPS = 32, 128  # entries a program of `plan` writes, groups it looks at together


class Triton:
    def unsupported(self, call: GroupedProduct) -> str:
        if not installed("triton"):
            return "Triton is not installed"
        if call.x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"our kernel takes bfloat16, float16 and float32, not {call.x.dtype}"
        if call.x.is_cuda:
            return "" if gpu.capability(call.x.device)[0] >= 8 else "it needs compute capability 8.0"
        from ..runtime.triton_version import interpreting

        return "" if interpreting() else f"it runs on CUDA, not on {call.x.device.type}"

    def compute(self, call: GroupedProduct, tiles: Tiles | None = None) -> Tensor:
        """`tiles` replaces the table's choice, for tuning and tests."""
        return rows_product(call, tiles) if call.product == "rows" else outer_product(call, tiles)


def bulk(*operands: Tensor) -> bool:
    """Whether these operands can be loaded through descriptors."""
    x = operands[0]
    if x.dtype == torch.float32 or not gpu.copies_tiles(x.device):
        return False
    return all(map(aligned, operands))


def describe(x: Tensor, block: list[int]) -> object:
    from ..runtime.triton_version import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def programs(device: torch.device, tiles: Tiles, count: int) -> int:
    """How many programs share out at most `count` tiles."""
    if tiles.per_sm == 0 or device.type != "cuda":
        return max(count, 1) if device.type == "cuda" else min(count, 3)
    return max(min(gpu.multiprocessors(device) * tiles.per_sm, count), 1)


def fallback(dtype: torch.dtype) -> Tiles:
    return FP32 if dtype == torch.float32 else POINTERS


def rows_product(call: GroupedProduct, tiles: Tiles | None = None) -> Tensor:
    from ..runtime.launch import launch
    from . import triton_kernels as kernels

    a, b, c = by_rows(call.x), by_matrices(call.y), call.empty()
    (m, k), (groups, _, n) = a.shape, b.shape
    by_columns = b.stride(2) != 1
    tma = bulk(a, b)
    if tiles is None:
        kind = "rows_t" if by_columns else "rows"
        tiles = tiles_for(kind, call.rows_per_group) if tma else fallback(a.dtype)
    row_tiles = -(-m // tiles.m) + groups  # at most: every group may end in a partial tile
    table = torch.empty(4 * (1 + row_tiles), dtype=torch.int32, device=a.device)
    launch(
        kernels.plan, (-(-row_tiles // PLAN_TILES),), call.sizes, table, m, groups, BLOCK_M=tiles.m, TILES=PLAN_TILES,
        GROUPS=PLAN_GROUPS, num_warps=8, tensors="any",
    )  # fmt: skip
    count = programs(a.device, tiles, row_tiles * -(-n // tiles.n))
    if tma:
        x = describe(a, [tiles.m, tiles.k])
        y = describe(b.mT, [1, tiles.n, tiles.k]) if by_columns else describe(b, [1, tiles.k, tiles.n])
    else:
        x, y = a, b
    launch(
        kernels.rows_product, (count,), x, y, c, table, m, n, k,
        a.stride(0), b.stride(0), b.stride(1), b.stride(2), c.stride(0), count,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, BAND=tiles.band,
        TMA=tma, B_BY_COLUMNS=by_columns, FLATTEN=tiles.flatten,
        PRECISION="tf32x3" if a.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, tensors="any",
    )  # fmt: skip
    return c


def outer_product(call: GroupedProduct, tiles: Tiles | None = None) -> Tensor:
    from ..runtime.launch import launch
    from . import triton_kernels as kernels

    a, d, c = by_rows(call.x), by_rows(call.y), call.empty()
    (m, k), n, groups = a.shape, d.shape[1], call.groups
    tma = bulk(a, d)
    if tiles is None:
        tiles = tiles_for("outer", call.rows_per_group) if tma else fallback(a.dtype)
    count = programs(a.device, tiles, groups * -(-k // tiles.m) * -(-n // tiles.n))
    launch(
        kernels.outer_product, (count,),
        describe(a, [tiles.k, tiles.m]) if tma else None,
        describe(d, [tiles.k, tiles.n]) if tma else None,
        a, d, c, call.ends(), m, n, k, groups, a.stride(0), d.stride(0), count,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, BAND=tiles.band, TMA=tma,
        PRECISION="tf32x3" if a.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, tensors="any",
    )  # fmt: skip
    return c


backend = Triton()
