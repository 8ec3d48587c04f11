"""A recurrence's skip, ``o = y + D ⊙ x`` by channel or head, and the gradients of x and D: one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.runtime.strided import matrix
from ring_la.kernels.sizes import cdiv, power_of_2

TOKENS, CHANNELS, WARPS = 32, 128, 4
"""Tile of a program."""
RUN = 256
"""Tokens over which a program sums the gradient of D."""


def unsupported(x: Tensor, y: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    if any(t.dtype not in (torch.float32, torch.bfloat16, torch.float16) for t in (y, x)):
        return f"dtypes {y.dtype} and {x.dtype}"
    return ""


@triton.jit(do_not_specialize=("count", "stride"))
def skip_kernel(
    y, x, D, out, sums, count, stride, C: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, UNIT: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """RUN rows of C channels, WIDTH of them an entry of D: o, or (BACK: y is its gradient) dx and sums of do x."""
    columns: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % columns * BC + tl.arange(0, BC)
    run = tl.program_id(0) // columns
    inside = c < C
    factor = tl.load(D + c // WIDTH, inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BT, BC], tl.float32)
    for first in range(run * RUN, min(run * RUN + RUN, count), BT):
        i = (first + tl.arange(0, BT)).to(tl.int64)[:, None]
        live = (i < count) & inside[None, :]
        a = tl.load(y + i * C + c[None, :], live, other=0.0).to(tl.float32)
        b = tl.load(x + i * (stride * UNIT) + c[None, :], live, other=0.0).to(tl.float32)
        if BACK:
            total += a * b
            tl.store(out + i * C + c[None, :], (factor * a).to(out.dtype.element_ty), live)
        else:
            tl.store(out + i * C + c[None, :], (a + factor * b).to(out.dtype.element_ty), live)
    if BACK:
        tl.store(sums + run * C + c, tl.sum(total, 0), inside)


@replayed(3, strided=True)
def _launch(y: Tensor, x: Tensor, D: Tensor, dtype: torch.dtype, back: bool) -> tuple[Tensor, Tensor | None]:
    C = x.shape[2] * x.shape[3]
    (flat, unit, step), y, D = matrix(x, C), aligned(y), aligned(D)
    count, block = x.shape[0] * x.shape[1], min(CHANNELS, max(16, power_of_2(C)))
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    runs = cdiv(count, RUN)
    sums = torch.empty(runs, C, device=x.device) if back else None
    if count:
        launch(
            skip_kernel, (runs * cdiv(C, block),), y, flat, D, out, D if sums is None else sums, count, step, C=C,
            WIDTH=C // D.numel(), RUN=RUN, BT=TOKENS * CHANNELS // block, BC=block, UNIT=unit, BACK=back,
            num_warps=WARPS, tensors="strided",
        )  # fmt: skip
    return out, sums


def forward(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """y and x ``[B, T, H, V]``, D ``[H]`` or ``[H, V]``; o in x's dtype."""
    return _launch(y, x, D, x.dtype, False)[0]


def backward(do: Tensor, x: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and D."""
    dx, sums = _launch(do, x, D, x.dtype, True)
    total = sums.sum(0).view(x.shape[2:])
    return dx, (total if D.dim() == 2 else total.sum(1)).to(D.dtype)
