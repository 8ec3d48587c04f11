"""Rows of unit length, ``y = x · rsqrt(Σ x² + eps)``, and the gradient: one pass each.

With r = rsqrt(Σ x² + eps):  dx = r dy − r³ x (x · dy). Rows of x may lie apart (heads cut out of a wider projection); y
and the gradient are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.runtime.strided import rows, strides
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS, WARPS = 4096, 4
"""Of a program's tile."""


def unsupported(x: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    return "" if 1 <= x.shape[-1] <= 2048 else f"rows of {x.shape[-1]}"


@triton.jit(do_not_specialize=("T", "rows", "sb", "st", "sh"))
def unit_kernel(
    x, dy, out, T, rows, eps, sb, st, sh, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    UNIT: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """BR rows of [B, T, H] of D: y, or (BACK) dx from the rows of dy."""
    i = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (i < rows) & (d < D)
    token = i // H
    at = (token // T * sb + token % T * st + i % H * sh) * UNIT + d
    y = tl.load(x + at, inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    if BACK:
        g = tl.load(dy + i * D + d, inside, other=0.0).to(tl.float32)
        y = r * (g - y * (r * r) * tl.sum(y * g, 1)[:, None])
    else:
        y *= r
    tl.store(out + i * D + d, y.to(out.dtype.element_ty), inside)


@replayed(2, strided=True)
def _launch(x: Tensor, dy: Tensor | None, eps: float) -> Tensor:
    """``x [B, T, H, D]`` with rows of unit length, or the gradient of x given that of the result; contiguous."""
    x = rows(x)
    B, T, H, D = x.shape
    unit, steps = strides(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_2(D)
    tall = max(1, ELEMENTS // block)
    count = B * T * H
    if count:
        launch(
            unit_kernel, (cdiv(count, tall),), x, x if dy is None else aligned(dy), out, T, count, eps, *steps, H=H,
            D=D, BR=tall, BD=block, UNIT=unit, BACK=dy is not None, num_warps=WARPS, tensors="strided",
        )  # fmt: skip
    return out


def forward(x: Tensor, eps: float) -> Tensor:
    """``x [B, T, H, D]`` with rows of unit length."""
    return _launch(x, None, eps)


def backward(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    """The gradient of x."""
    return _launch(x, dy, eps)
