"""Log-decays from what a projection gives, ``g = −factor · e^{A_log} · softplus(y)`` with y = sign · (a + bias), or
`bounded`, ``g = −factor · sigmoid(z)`` with z = e^{A_log} · y.

One pass each way. dbias = Σ da, and with c = −factor · e^{A_log}, s = sigmoid(y) or sigmoid(z):

    da = dg c sign s,   dA_log = Σ dg g;     bounded: da = dg c sign s (1 − s),   dA_log = Σ −dg factor s (1 − s) z
"""

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
RUN = 512
"""Tokens over which a program sums the gradients of bias and A_log."""


def unsupported(a: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    return "" if a.dtype in (torch.float32, torch.bfloat16, torch.float16) else f"dtype {a.dtype}"


@triton.jit
def softplus(y):
    """log(1 + e^y), to fp32's precision also where e^y is small."""
    e = tl.exp(-tl.abs(y))
    series = e * (1 - e * (0.5 - e * (0.33333333 - 0.25 * e)))
    return tl.maximum(y, 0.0) + tl.where(e < 1e-2, series, tl.log(1 + e))


@triton.jit(do_not_specialize=("rows", "stride"))
def decay_kernel(
    a, bias, A_log, dg, out, sums, rows, stride, sign, factor, C: tl.constexpr, WIDTH: tl.constexpr,
    RUN: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, BOUNDED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """RUN rows of C channels, WIDTH of them a head: g, or (BACK) da and the sums of da and dg g, ``[runs, 2, C]``."""
    columns: tl.constexpr = (C + BC - 1) // BC
    c = tl.program_id(0) % columns * BC + tl.arange(0, BC)
    run = tl.program_id(0) // columns
    inside = c < C
    shift = tl.zeros([BC], tl.float32)
    rate = tl.full([BC], 1.0, tl.float32)
    if BIAS:
        shift += tl.load(bias + c, inside, other=0.0).to(tl.float32)
    if SCALED:
        rate = tl.exp(tl.load(A_log + c // WIDTH, inside, other=0.0).to(tl.float32))
    scale = -factor * rate
    to_bias = tl.zeros([BC], tl.float32)
    to_scale = tl.zeros([BC], tl.float32)
    for first in range(run * RUN, min(run * RUN + RUN, rows), BT):
        i = first + tl.arange(0, BT)
        live = (i < rows)[:, None] & inside[None, :]
        at = i.to(tl.int64)[:, None] * C + c[None, :]
        y = tl.load(a + i.to(tl.int64)[:, None] * (stride * UNIT) + c[None, :], live, other=0.0).to(tl.float32)
        y = sign * (y + shift[None, :])
        if BOUNDED:
            y *= rate[None, :]
        if BACK:
            d = tl.load(dg + at, live, other=0.0).to(tl.float32)
            slope = tl.sigmoid(y)
            if BOUNDED:
                slope *= tl.sigmoid(-y)
                to_scale += tl.sum(d * slope * y, 0) * -factor
            else:
                to_scale += tl.sum(d * softplus(y), 0) * scale
            da = d * (scale * sign)[None, :] * slope
            to_bias += tl.sum(da, 0)
            tl.store(out + at, da.to(out.dtype.element_ty), live)
        elif BOUNDED:
            tl.store(out + at, -factor * tl.sigmoid(y), live)
        else:
            tl.store(out + at, scale[None, :] * softplus(y), live)
    if BACK:
        tl.store(sums + run * (2 * C) + c, to_bias, inside)
        tl.store(sums + run * (2 * C) + C + c, to_scale, inside)


@replayed(4, strided=True)
def _launch(
    a: Tensor, A_log: Tensor | None, bias: Tensor | None, dg: Tensor | None, sign: float, factor: float, bounded: bool
) -> tuple[Tensor, Tensor]:
    C = a.shape[-1]
    flat, unit, step = matrix(a, C)
    count = a.numel() // C
    out = torch.empty(a.shape, dtype=torch.float32 if dg is None else a.dtype, device=a.device)
    runs = cdiv(count, RUN)
    sums = torch.empty(0 if dg is None else runs, 2, C, device=a.device)
    block = min(CHANNELS, max(16, power_of_2(C)))
    bias, A_log, dg = (None if t is None else aligned(t) for t in (bias, A_log, dg))
    if count:
        launch(
            decay_kernel, (runs * cdiv(C, block),), flat, flat if bias is None else bias,
            flat if A_log is None else A_log, flat if dg is None else dg, out, sums, count, step, sign, factor, C=C,
            WIDTH=1 if A_log is None else C // A_log.shape[0], RUN=RUN, BT=TOKENS * CHANNELS // block, BC=block,
            UNIT=unit, BIAS=bias is not None, SCALED=A_log is not None, BOUNDED=bounded, BACK=dg is not None,
            num_warps=WARPS, tensors="strided",
        )  # fmt: skip
    return out, sums


def forward(a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float, bounded: bool) -> Tensor:
    """g, fp32; see `log_decay`."""
    return _launch(a, A_log, bias, None, sign, factor, bounded)[0]


def backward(
    dg: Tensor, a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float, bounded: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of a, A_log and bias."""
    da, sums = _launch(a, A_log, bias, dg, sign, factor, bounded)
    sums = sums.sum(0)
    dA = None if A_log is None else sums[1].view(A_log.shape[0], -1).sum(1).to(A_log.dtype)
    return da, dA, None if bias is None else sums[0].to(bias.dtype)
