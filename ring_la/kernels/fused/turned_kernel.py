"""A ReLU and its pairs of channels turned, in one pass: x is read once, both results are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS, WARPS = 2048, 4
"""Of a program's tile of whole heads."""


def unsupported(x: Tensor, cos: Tensor, sin: Tensor) -> str:
    """Why this kernel cannot take a call, or an empty string."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return f"tables of {cos.dtype} and {sin.dtype}"
    (B, T, _, D), shapes = x.shape, {tuple(cos.shape), tuple(sin.shape)}
    if not shapes <= {(1, T, 1, D), (B, T, 1, D)} or len(shapes) > 1:
        return f"tables of {shapes}"
    return "" if D % 2 == 0 and 2 <= D <= ELEMENTS else f"a head size {D}"


@triton.jit(do_not_specialize=("count", "tokens"))
def turned_kernel(
    x, cos, sin, y, z, count, tokens, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """BR heads of x ``[count, D]``, of which H stand at each token; the tables have so many `tokens`."""
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    e, i = tl.arange(0, BD), tl.arange(0, BD // 2)
    at = r[:, None] * D + e[None, :]
    inside = (r < count)[:, None] & (e < D)[None, :]
    relu = tl.maximum(tl.load(x + at, inside, other=0.0).to(tl.float32), 0.0)
    tl.store(y + at, relu.to(y.dtype.element_ty), inside)
    table = (r // H % tokens)[:, None] * D + 2 * i[None, :]
    known = (r < count)[:, None] & (i < D // 2)[None, :]
    c = tl.load(cos + table, known, other=0.0)
    s = tl.load(sin + table + 1, known, other=0.0)
    y1, y2 = tl.split(tl.reshape(relu, (BR, BD // 2, 2)))
    turned = tl.reshape(tl.join(y1 * c - y2 * s, y1 * s + y2 * c), (BR, BD))
    tl.store(z + at, turned.to(z.dtype.element_ty), inside)


@replayed(3)
def forward(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """y and z ``[B, T, H, D]``."""
    x, cos, sin = aligned(x), aligned(cos), aligned(sin)
    D = x.shape[-1]
    y, z = torch.empty_like(x), torch.empty_like(x)
    count, wide = x.numel() // D, power_of_2(D)
    rows = max(1, ELEMENTS // wide)
    if count:
        launch(
            turned_kernel, (cdiv(count, rows),), x, cos, sin, y, z, count, cos.shape[0] * cos.shape[1], H=x.shape[2],
            D=D, BR=rows, BD=wide, num_warps=WARPS,
        )  # fmt: skip
    return y, z
