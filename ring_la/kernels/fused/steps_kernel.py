"""Mamba-2's time step alone: ``Δ = dt + bias``, perhaps through a softplus, and ``g = Δ A``: one pass each way.

With dΔ' = dΔ + dg A:  ddt = dΔ' (times the softplus' slope),  dbias = Σ ddt,  dA = Σ dg Δ,  dD = Σ of D's by token
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fused.log_decay_kernel import softplus
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.runtime.strided import matrix
from ring_la.kernels.sizes import cdiv, power_of_2

TOKENS, HEADS, WARPS = 32, 128, 4
"""Tile of a program."""
RUN = 128
"""Tokens over which a program sums the gradients of what tokens share."""


def unsupported(dt: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    return "" if dt.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {dt.dtype}"


@triton.jit(do_not_specialize=("rows", "stride"))
def steps_kernel(
    dt, A, bias, to_step, to_decay, to_skip, out, g, sums, rows, stride, H: tl.constexpr, RUN: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    BACK: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """RUN rows of H heads: Δ and g, or (BACK) ddt and the sums of dg Δ, ddt and (SKIP) `to_skip`, ``[runs, 3, H]``."""
    columns: tl.constexpr = (H + BH - 1) // BH
    h = tl.program_id(0) % columns * BH + tl.arange(0, BH)
    run = tl.program_id(0) // columns
    inside = h < H
    a = tl.load(A + h, inside, other=0.0).to(tl.float32)
    shift = tl.zeros([BH], tl.float32)
    if BIAS:
        shift += tl.load(bias + h, inside, other=0.0).to(tl.float32)
    of_A = tl.zeros([BH], tl.float32)
    of_bias = tl.zeros([BH], tl.float32)
    of_D = tl.zeros([BH], tl.float32)
    for first in range(run * RUN, min(run * RUN + RUN, rows), BT):
        i = first + tl.arange(0, BT)
        live = (i < rows)[:, None] & inside[None, :]
        at = i.to(tl.int64)[:, None] * H + h[None, :]
        z = tl.load(dt + i.to(tl.int64)[:, None] * (stride * UNIT) + h[None, :], live, other=0.0).to(tl.float32)
        z += shift[None, :]
        step = softplus(z) if SOFTPLUS else z
        if BACK:
            u = tl.load(to_decay + at, live, other=0.0).to(tl.float32)
            d = tl.load(to_step + at, live, other=0.0).to(tl.float32) + u * a[None, :]
            if SOFTPLUS:
                d *= tl.sigmoid(z)
            of_A += tl.sum(u * step, 0)
            of_bias += tl.sum(d, 0)
            if SKIP:
                of_D += tl.sum(tl.load(to_skip + at, live, other=0.0).to(tl.float32), 0)
            tl.store(out + at, d.to(out.dtype.element_ty), live)
        else:
            tl.store(out + at, step, live)
            tl.store(g + at, step * a[None, :], live)
    if BACK:
        found = sums + run * (3 * H) + h
        tl.store(found, of_A, inside)
        tl.store(found + H, of_bias, inside)
        tl.store(found + 2 * H, of_D, inside)


@replayed(6, strided=True)
def _launch(
    dt: Tensor, A: Tensor, bias: Tensor | None, dstep: Tensor | None, dg: Tensor | None, dskip: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(Δ, g), or of their gradients (ddt, sums ``[runs, 3, H]``)."""
    H, back = dt.shape[-1], dg is not None
    flat, unit, step = matrix(dt, H)
    count = dt.numel() // H
    runs, block = cdiv(count, RUN), min(HEADS, max(16, power_of_2(H)))
    out = torch.empty(dt.shape, dtype=dt.dtype if back else torch.float32, device=dt.device)
    more = torch.empty((runs, 3, H) if back else dt.shape, device=dt.device)
    bias, dstep, dg, dskip = (flat if t is None else aligned(t) for t in (bias, dstep, dg, dskip))
    if count:
        launch(
            steps_kernel, (runs * cdiv(H, block),), flat, aligned(A), bias, dstep, dg, dskip, out, more, more, count,
            step, H=H, RUN=RUN, BT=min(RUN, TOKENS * HEADS // block), BH=block, UNIT=unit, BIAS=bias is not flat,
            SOFTPLUS=softplus, BACK=back, SKIP=dskip is not flat, num_warps=WARPS, tensors="strided",
        )  # fmt: skip
    return out, more


def forward(dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """(Δ, g), fp32; see `steps.steps`."""
    return _launch(dt, A, bias, None, None, None, softplus)


def backward(
    dstep: Tensor, dg: Tensor, dskip: Tensor | None, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of dt, and those of A, the bias and D, fp32 ``[3, H]``."""
    ddt, sums = _launch(dt, A, bias, dstep, dg, dskip, softplus)
    return ddt, sums.sum(0)
