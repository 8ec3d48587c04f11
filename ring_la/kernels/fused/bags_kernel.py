"""Sums of rows by bag, and gradients of rows and weights by entry: one pass each, sums in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, filled, launch
from ring_la.kernels.sizes import cdiv, power_of_2

CHANNELS, WIDEST, WARPS = 2048, 8192, 4
"""Of a program's part of a row; of the rows whose gradients one program takes whole."""


def unsupported(y: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    if y.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {y.dtype}"
    return "" if 1 <= y.shape[1] <= WIDEST else f"rows of {y.shape[1]}"


@triton.jit
def sum_kernel(y, weight, entries, starts, out, D: tl.constexpr, BD: tl.constexpr, WEIGHED: tl.constexpr):
    """BD channels of one bag's sum."""
    columns: tl.constexpr = (D + BD - 1) // BD
    bag = (tl.program_id(0) // columns).to(tl.int64)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    total = tl.zeros([BD], tl.float32)
    for i in range(tl.load(starts + bag), tl.load(starts + bag + 1)):
        entry = tl.load(entries + i)
        value = tl.load(y + entry * D + d, inside, other=0.0).to(tl.float32)
        total += value * tl.load(weight + entry).to(tl.float32) if WEIGHED else value
    tl.store(out + bag * D + d, total.to(out.dtype.element_ty), inside)


@triton.jit
def gradient_kernel(do, y, weight, row, dy, dweight, D: tl.constexpr, BD: tl.constexpr):
    """One entry's gradient, and that of its weight."""
    entry = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    g = tl.load(do + tl.load(row + entry) * D + d, inside, other=0.0).to(tl.float32)
    value = tl.load(y + entry * D + d, inside, other=0.0).to(tl.float32)
    w = tl.load(weight + entry).to(tl.float32)
    tl.store(dy + entry * D + d, (g * w).to(dy.dtype.element_ty), inside)
    tl.store(dweight + entry, tl.sum(g * value, 0).to(dweight.dtype.element_ty))


def forward(y: Tensor, weight: Tensor | None, entries: Tensor, starts: Tensor) -> Tensor:
    """The sums ``[R, D]``."""
    y, R, D = aligned(y), len(starts) - 1, y.shape[1]
    out = torch.empty(R, D, dtype=y.dtype, device=y.device)
    block = min(CHANNELS, power_of_2(D))
    some, by = filled(None if weight is None else aligned(weight), aligned(entries), by=y)
    if R:
        grid = (R * cdiv(D, block),)
        launch(sum_kernel, grid, y, some, by, aligned(starts), out, D=D, BD=block, WEIGHED=weight is not None,
               num_warps=WARPS)  # fmt: skip
    return out


def backward(do: Tensor, y: Tensor, weight: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y and of the weight."""
    do, y, weight, (M, D) = aligned(do), aligned(y), aligned(weight), y.shape
    dy, dweight = torch.empty_like(y), torch.empty_like(weight)
    if M:
        launch(gradient_kernel, (M,), do, y, weight, aligned(row), dy, dweight, D=D, BD=power_of_2(D), num_warps=WARPS)
    return dy, dweight
