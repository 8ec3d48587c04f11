"""Queries and keys with their running sums as further channels (see `softmax.sums`), each in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.runtime.strided import rows, strides
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS, WARPS = 4096, 4
"""Of a program's tile."""


def unsupported(q: Tensor, k: Tensor) -> str:
    """Why this kernel cannot take a call, or an empty string."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or k.dtype != q.dtype or k.shape != q.shape:
        return f"{q.dtype} and {k.dtype}, {list(q.shape)} and {list(k.shape)}"
    return "" if 1 <= q.shape[-1] <= 1024 else f"heads of {q.shape[-1]}"


@triton.jit(do_not_specialize=("T", "rows", "sb", "st", "sh", "cb", "ct", "ch"))
def sum_channels_kernel(
    x, c, out, T, rows, sb, st, sh, cb, ct, ch, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """BR rows of ``x [B, T, H, D]`` and ``c [B, T, H]``, fp64: x, then PARTS parts of c and as many ones, of keys ones
    and parts of −c, and zeros up to W."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d, s = tl.arange(0, BD)[None, :], tl.arange(0, BS)[None, :]
    live = i < rows
    token, h = i // H, i % H
    b, t = token // T, token % T
    inside = live[:, None] & (d < D)
    own = tl.load(x + (b * sb + t * st + h * sh)[:, None] * UNIT + d, inside)
    tl.store(out + i[:, None] * W + d, own, inside)
    left = tl.load(c + b * cb + t * ct + h * ch, live, other=0.0)
    first = PARTS if OF_KEYS else 0
    tail = tl.where((s >= PARTS - first) & (s < 2 * PARTS - first), 1.0, 0.0) + tl.zeros((BR, 1), tl.float32)
    for n in tl.static_range(PARTS):
        part = left.to(tl.float32).to(out.dtype.element_ty)
        left -= part.to(tl.float64)
        signed = -part.to(tl.float32) if OF_KEYS else part.to(tl.float32)
        tail = tl.where(s == first + n, signed[:, None], tail)
    tl.store(out + i[:, None] * W + D + s, tail.to(out.dtype.element_ty), live[:, None] & (s < W - D))


def _widened(x: Tensor, c: Tensor, parts: int, width: int, of_keys: bool) -> Tensor:
    x = rows(x)
    B, T, H, D = x.shape
    unit, steps = strides(x)
    out, count, block = x.new_empty(B, T, H, width), B * T * H, power_of_2(D)
    tall = max(1, ELEMENTS // block)
    if count:
        launch(
            sum_channels_kernel, (cdiv(count, tall),), x, c, out, T, count, *steps, *c.stride(), H=H, D=D, W=width,
            PARTS=parts, BR=tall, BD=block, BS=power_of_2(width - D), UNIT=unit, OF_KEYS=of_keys, num_warps=WARPS,
            tensors="strided",
        )  # fmt: skip
    return out


def forward(q: Tensor, k: Tensor, c: Tensor, parts: int, width: int) -> tuple[Tensor, Tensor]:
    """q and k ``[B, T, H, D]`` as ``[B, T, H, width]`` with the sums ``c [B, T, H]``, fp64, in so many parts."""
    return _widened(q.detach(), c.detach(), parts, width, False), _widened(k.detach(), c.detach(), parts, width, True)
