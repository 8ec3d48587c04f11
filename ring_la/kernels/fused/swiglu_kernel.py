"""``o = SiLU(gate) ⊙ up`` of the halves of one tensor's rows, and the gradient of both in one tensor.

With s = sigmoid(gate):  dgate = do ⊙ up ⊙ s (1 + gate (1 − s)),   dup = do ⊙ gate s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv, power_of_2

ROWS, CHANNELS, WARPS = 4, 512, 4
"""Tile of a program."""


def unsupported(y: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    if y.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {y.dtype}"
    return "" if y.shape[-1] % 2 == 0 else f"rows of {y.shape[-1]}"


@triton.jit(do_not_specialize=("count",))
def swiglu_kernel(y, do, out, count, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BACK: tl.constexpr):
    """BR rows of BC channels of o ``[count, D]``, or (BACK) of both halves of y's gradient ``[count, 2 D]``."""
    columns: tl.constexpr = (D + BC - 1) // BC
    c = (tl.program_id(0) % columns * BC + tl.arange(0, BC))[None, :]
    i = (tl.program_id(0) // columns * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    inside = (i < count) & (c < D)
    at = i * (2 * D) + c
    gate = tl.load(y + at, inside, other=0.0).to(tl.float32)
    up = tl.load(y + at + D, inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    if BACK:
        g = tl.load(do + i * D + c, inside, other=0.0).to(tl.float32)
        tl.store(out + at, (g * up * s * (1 + gate * (1 - s))).to(out.dtype.element_ty), inside)
        tl.store(out + at + D, (g * gate * s).to(out.dtype.element_ty), inside)
    else:
        tl.store(out + i * D + c, (gate * s * up).to(out.dtype.element_ty), inside)


@replayed(2)
def _launch(y: Tensor, do: Tensor | None) -> Tensor:
    y, D = aligned(y), y.shape[-1] // 2
    back = do is not None
    out = torch.empty(y.shape if back else (*y.shape[:-1], D), dtype=y.dtype, device=y.device)
    count = y.numel() // max(1, 2 * D)
    block = min(CHANNELS, max(16, power_of_2(D)))
    tall = ROWS * CHANNELS // block
    if count and D:
        launch(
            swiglu_kernel, (cdiv(count, tall) * cdiv(D, block),), y, aligned(do) if back else y, out, count, D=D,
            BR=tall, BC=block, BACK=back, num_warps=WARPS,
        )  # fmt: skip
    return out


def forward(y: Tensor) -> Tensor:
    """o ``[…, D]`` of y ``[…, 2 D]``."""
    return _launch(y, None)


def backward(do: Tensor, y: Tensor) -> Tensor:
    """The gradient of y."""
    return _launch(y, do)
