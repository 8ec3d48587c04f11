"""RMS norm with an optional gate, ``o = x / rms(x) ⊙ w ⊙ act(gate)``, and its gradients: one pass each.

With r = rsqrt(mean x² + eps), n = r x, a = act(gate) and h = do ⊙ w ⊙ a:

    dx = r (h − n mean(h n)),   dgate = do ⊙ w ⊙ n ⊙ act'(gate),   dw = Σ do ⊙ n ⊙ a
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS, PROGRAMS = 4096, 1056
"""Of a tile, and programs that share the sum for the weight's gradient: eight a multiprocessor of 132."""
WIDEST = 8192


def unsupported(x: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    return "" if 1 <= x.shape[-1] <= WIDEST else f"rows of {x.shape[-1]}"


@triton.jit(do_not_specialize=("rows", "RUN"))
def rms_kernel(
    x, weight, gate, do, out, dgate, sums, rows, RUN, eps, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """RUN rows of D: o, or (BACK) dx, dgate and the sum for dw ``[programs, D]``."""
    d = tl.arange(0, BD)
    inside = d < D
    w = tl.load(weight + d, inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BD], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * RUN
    for first in range(begin, tl.minimum(begin + RUN, rows), BR):
        i = first + tl.arange(0, BR)
        live = (i < rows)[:, None] & inside[None, :]
        at = i.to(tl.int64)[:, None] * D + d[None, :]
        y = tl.load(x + at, live, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
        y = y * r
        if GATED:
            z = tl.load(gate + at, live, other=0.0).to(tl.float32)
            s = tl.sigmoid(z)
            a = z * s if SILU else s
        else:
            s = y * 0.0 + 1.0
            z = s
            a = s
        if BACK:
            g = tl.load(do + at, live, other=0.0).to(tl.float32)
            total += tl.sum(g * y * a, 0)
            h = g * w * a
            dx = r * (h - y * (tl.sum(h * y, 1) / D)[:, None])
            tl.store(out + at, dx.to(out.dtype.element_ty), live)
            if GATED:
                slope = s * (1 + z * (1 - s)) if SILU else s * (1 - s)
                tl.store(dgate + at, (g * w * y * slope).to(dgate.dtype.element_ty), live)
        else:
            tl.store(out + at, (y * w * a).to(out.dtype.element_ty), live)
    if BACK:
        tl.store(sums + tl.program_id(0) * D + d, total, inside)


@replayed(4)
def _launch(
    x: Tensor, weight: Tensor, gate: Tensor | None, do: Tensor | None, silu: bool, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, weight = aligned(x), aligned(weight)
    gate, do = (None if t is None else aligned(t) for t in (gate, do))
    D = x.shape[-1]
    rows, block = x.numel() // D, power_of_2(D)
    tall = max(1, ELEMENTS // block)
    run = tall * max(1, cdiv(rows, tall * PROGRAMS)) if do is not None else tall
    programs = cdiv(rows, run)
    out = torch.empty_like(x)
    dgate = None if gate is None or do is None else torch.empty_like(gate)
    sums = None if do is None else torch.empty(programs, D, device=x.device)
    if rows:
        launch(
            rms_kernel, (programs,), x, weight, x if gate is None else gate, x if do is None else do, out,
            x if dgate is None else dgate, x if sums is None else sums, rows, run, eps, D=D, BR=tall, BD=block,
            GATED=gate is not None, SILU=silu, BACK=do is not None, num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return out, dgate, sums


def forward(x: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float) -> Tensor:
    """``x [..., D]``, weight ``[D]``, gate like x; see `rms_norm`."""
    return _launch(x, weight, gate, None, silu, eps)[0]


def backward(
    do: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and gate."""
    dx, dgate, sums = _launch(x, weight, gate, do, silu, eps)
    return dx, sums.sum(0).to(weight.dtype), dgate
