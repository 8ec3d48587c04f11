"""``a = p e^−g`` and ``g``, of which nothing is below a least value: one pass each way.

dp = e^−g da,   dg = dg − Σ da a  where g is not below it, else 0
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


def unsupported(p: Tensor, g: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    wide = [t.dtype for t in (p, g) if t.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    if wide:
        return f"dtype {wide[0]}"
    return "" if 1 <= p.shape[-1] <= 2048 else f"rows of {p.shape[-1]}"


@triton.jit(do_not_specialize=("T", "rows", "sb", "st", "sh"))
def ahead_kernel(
    p, g, da, dg, out, kept, T, rows, least, sb, st, sh, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, UNIT: tl.constexpr, BACK: tl.constexpr, READ: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """BR rows of [B, T, H] of D: a and g, or (BACK) dp and dg, from da (READ) and dg (GATE)."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)[None, :]
    live = i < rows
    inside = live[:, None] & (d < D)
    token = i // H
    at = (token // T * sb + token % T * st + i % H * sh)[:, None] * UNIT + d
    x = tl.load(p + at, inside, other=0.0).to(tl.float32)
    given = tl.load(g + i, live, other=0.0).to(tl.float32)
    gate = tl.where(given < least, least, given)  # a NaN stays one
    grown = tl.exp(-gate)[:, None]
    into = i[:, None] * D + d
    if BACK:
        found = tl.zeros([BR], tl.float32)
        dx = x * 0
        if READ:
            dx = tl.load(da + into, inside, other=0.0).to(tl.float32) * grown
            found -= tl.sum(dx * x, 1)
        if GATE:
            found += tl.load(dg + i, live, other=0.0).to(tl.float32)
        tl.store(out + into, dx.to(out.dtype.element_ty), inside)
        tl.store(kept + i, tl.where(given >= least, found, 0.0).to(kept.dtype.element_ty), live)
    else:
        tl.store(out + into, (x * grown).to(out.dtype.element_ty), inside)
        tl.store(kept + i, gate.to(kept.dtype.element_ty), live)


@replayed(4, strided=True)
def _launch(
    p: Tensor, g: Tensor, da: Tensor | None, dg: Tensor | None, least: float, back: bool
) -> tuple[Tensor, Tensor]:
    p, g = rows(p), aligned(g)
    da, dg = (None if t is None else aligned(t) for t in (da, dg))
    B, T, H, D = p.shape
    unit, steps = strides(p)
    count, block = B * T * H, power_of_2(D)
    out, kept = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (p, g))
    tall = max(1, ELEMENTS // block)
    if count:
        launch(
            ahead_kernel, (cdiv(count, tall),), p, g, p if da is None else da, g if dg is None else dg, out, kept, T,
            count, least, *steps, H=H, D=D, BR=tall, BD=block, UNIT=unit, BACK=back, READ=da is not None,
            GATE=dg is not None, num_warps=WARPS, tensors="strided",
        )  # fmt: skip
    return out, kept


def forward(p: Tensor, g: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """(a like p, g from `least` on)."""
    return _launch(p, g, None, None, least, False)


def backward(da: Tensor | None, dg: Tensor | None, p: Tensor, g: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Gradients of p and g."""
    return _launch(p, g, da, dg, least, True)
