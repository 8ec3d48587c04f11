"""w = e^x / Σ e^x by rows, w in fp32, and dx = w (dw − Σ w dw), for which w is made again: one pass each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS, WARPS = 4096, 4
"""Of a program's tile."""


def unsupported(x: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    return "" if x.dim() and 1 <= x.shape[-1] <= 2048 else f"shape {[*x.shape]}"


@triton.jit(do_not_specialize=("rows",))
def wide_softmax_kernel(x, dw, out, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BACK: tl.constexpr):
    """BR rows of D: w, or (BACK) dx."""
    i = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    d = tl.arange(0, BD)[None, :]
    at = i * D + d
    live = i < rows
    y = tl.load(x + at, live & (d < D), other=0.0).to(tl.float32)
    y = tl.where(d < D, y, float("-inf"))
    w = tl.exp(y - tl.max(y, 1)[:, None])
    w /= tl.sum(w, 1)[:, None]
    if BACK:
        g = tl.load(dw + at, live & (d < D), other=0.0).to(tl.float32)
        w *= g - tl.sum(w * g, 1)[:, None]
    tl.store(out + at, w.to(out.dtype.element_ty), live & (d < D))


@replayed(2)
def _launch(x: Tensor, dw: Tensor | None) -> Tensor:
    D = x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float32 if dw is None else x.dtype, device=x.device)
    block, count = power_of_2(D), x.numel() // D
    tall = max(1, ELEMENTS // block)
    if count:
        launch(
            wide_softmax_kernel, (cdiv(count, tall),), x, x if dw is None else dw, out, count, D=D, BR=tall, BD=block,
            BACK=dw is not None, num_warps=WARPS,
        )  # fmt: skip
    return out


def forward(x: Tensor) -> Tensor:
    """The softmax of rows, fp32."""
    return _launch(x, None)


def backward(dw: Tensor, x: Tensor) -> Tensor:
    """The gradient of x."""
    return _launch(x, dw)
