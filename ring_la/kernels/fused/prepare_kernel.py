"""What a delta rule's tokens bring, of what projections give: q and k of unit length, log-decays and rates β, all in
one launch each way (see `prepare`).

Programs of one launch have four jobs, by their number. With s = sigmoid(z), z what each is of:

    unit length  y = r x, r = rsqrt(Σ x² + eps)       dx = r dy − r³ x (x · dy)
    softplus     g = −e^{A_log} softplus(a + bias)     da = −e^{A_log} s dg,                dbias = Σ da, dA_log = Σ dg g
    bounded      g = low s, z = e^{A_log} (a + bias)   da = low s (1 − s) e^{A_log} dg,     dbias = Σ da, dA_log = Σ da (a + bias)
    rate         β = most s                            db = most s (1 − s) dβ
"""  # noqa: E501

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fused.log_decay_kernel import softplus
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.runtime.strided import matrix, rows, strides
from ring_la.kernels.spans.table import cdiv, power_of_2

ELEMENTS, WARPS = 4096, 4
"""Of a program's tile."""
RUN = 512
"""Tokens over which a program sums the gradients of bias and A_log."""


def unsupported(q: Tensor, a: Tensor, b: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    kinds = {x.dtype for x in (q, a, b)} - {torch.float32, torch.bfloat16, torch.float16}
    if kinds:
        return f"dtypes {kinds}"
    return "" if 1 <= q.shape[-1] <= 2048 else f"heads of {q.shape[-1]}"


@triton.jit
def _unit(x, dy, out, first, T, count, eps, sb, st, sh, H, D, BR, BD, UNIT, BACK: tl.constexpr):
    """BR rows of [B, T, H] of D: y, or (BACK) dx."""
    i = (first.to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (i < count * H) & (d < D)
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


@triton.jit
def _gate(
    a, bias, A_log, dg, out, sums, part, count, stride, low, C, WIDTH, RUN, BT, BC, UNIT, BIAS: tl.constexpr,
    SCALED: tl.constexpr, BOUNDED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """RUN rows of C channels, WIDTH of them a head: g, or (BACK) da, and for bias and A_log ``sums [runs, 2, C]``."""
    columns = (C + BC - 1) // BC
    c = part % columns * BC + tl.arange(0, BC)
    run = part // columns
    inside = c < C
    shift = tl.zeros([BC], tl.float32)
    rate = tl.zeros([BC], tl.float32) + 1.0
    if BIAS:
        shift += tl.load(bias + c, inside, other=0.0).to(tl.float32)
    if SCALED:
        rate *= tl.exp(tl.load(A_log + c // WIDTH, inside, other=0.0).to(tl.float32))
    to_bias = tl.zeros([BC], tl.float32)
    to_scale = tl.zeros([BC], tl.float32)
    for first in range(run * RUN, min(run * RUN + RUN, count), BT):
        i = (first + tl.arange(0, BT)).to(tl.int64)[:, None]
        live = (i < count) & inside[None, :]
        y = tl.load(a + i * (stride * UNIT) + c[None, :], live, other=0.0).to(tl.float32) + shift[None, :]
        s = tl.sigmoid(y * rate[None, :] if BOUNDED else y)
        if BACK:
            d = tl.load(dg + i * C + c[None, :], live, other=0.0).to(tl.float32) * rate[None, :]
            if BOUNDED:
                d *= low * s * (1 - s)
                to_scale += tl.sum(d * y, 0)
            else:
                to_scale -= tl.sum(d * softplus(y), 0)
                d *= -s
            to_bias += tl.sum(d, 0)
            tl.store(out + i * C + c[None, :], d.to(out.dtype.element_ty), live)
        else:
            tl.store(out + i * C + c[None, :], low * s if BOUNDED else -rate[None, :] * softplus(y), live)
    if BACK:
        tl.store(sums + run * (2 * C) + c, to_bias, inside)
        tl.store(sums + run * (2 * C) + C + c, to_scale, inside)


@triton.jit
def _rate(b, db, out, part, count, stride, most, H, BE, UNIT, BACK: tl.constexpr):
    """BE of the rates, or (BACK) of the gradients of what they are of."""
    i = part.to(tl.int64) * BE + tl.arange(0, BE)
    live = i < count * H
    s = tl.sigmoid(tl.load(b + i // H * (stride * UNIT) + i % H, live, other=0.0).to(tl.float32))
    if BACK:
        s *= (1 - s) * tl.load(db + i, live, other=0.0).to(tl.float32)
    tl.store(out + i, (most * s).to(out.dtype.element_ty), live)


@triton.jit(
    do_not_specialize=("T", "count", "sb", "st", "sh", "tb", "tt", "th", "stride", "pace", "UNITS", "GATES")
)  # fmt: skip
def prepare_kernel(
    q, k, a, b, bias, A_log, dq, dk, dg, db, q_, k_, g_, b_, sums, T, count, sb, st, sh, tb, tt, th, stride, pace,
    UNITS, GATES, eps, low, most, HQ: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    H: tl.constexpr, RUN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    BE: tl.constexpr, UQ: tl.constexpr, UK: tl.constexpr, UA: tl.constexpr, UB: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, BOUNDED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """GATES programs make g (first, since they take longest), UNITS q, as many k, the others β; BACK: their gradients,
    into q_, k_, g_ and b_."""
    n = tl.program_id(0)
    if n < GATES:
        _gate(
            a, bias, A_log, dg, g_, sums, n, count, stride, low, C, WIDTH, RUN, BT, BC, UA, BIAS, SCALED, BOUNDED, BACK
        )  # fmt: skip
    elif n < GATES + UNITS:
        _unit(q, dq, q_, n - GATES, T, count, eps, sb, st, sh, HQ, D, BR, BD, UQ, BACK)
    elif n < GATES + 2 * UNITS:
        _unit(k, dk, k_, n - GATES - UNITS, T, count, eps, tb, tt, th, HQ, D, BR, BD, UK, BACK)
    else:
        _rate(b, db, b_, n - GATES - 2 * UNITS, count, pace, most, H, BE, UB, BACK)


@replayed(10, strided=True)
def _launch(q, k, a, b, A_log, bias, dq, dk, dg, db, lower_bound: float | None, most: float, eps: float):
    """q, k, g, β and nothing; or with gradients theirs, and ``[runs, 2, C]``, those of bias and A_log in parts."""
    q, k = rows(q), rows(k)
    A_log, bias, *grads = (None if t is None else aligned(t) for t in (A_log, bias, dq, dk, dg, db))
    back, device = dq is not None, q.device
    B, T, HQ, D = q.shape
    C, H, count = a.shape[-1], b.shape[-1], B * T
    (UQ, of_q), (UK, of_k), (flat, UA, stride), (thin, UB, pace) = strides(q), strides(k), matrix(a, C), matrix(b, H)
    wide, block = power_of_2(D), min(128, max(16, power_of_2(C)))
    tall, run = max(1, ELEMENTS // wide), RUN if back else ELEMENTS // block
    runs = cdiv(count, run)
    kinds = [x.dtype if back else torch.float32 for x in (a, b)]
    out = [torch.empty(x.shape, dtype=kind, device=device) for x, kind in zip((q, k, a, b), (q.dtype, k.dtype, *kinds))]
    sums = torch.empty(runs if back else 0, 2, C, device=device)
    units, gates = cdiv(count * HQ, tall), runs * cdiv(C, block)
    if count:
        launch(
            prepare_kernel, (2 * units + gates + cdiv(count * H, ELEMENTS),), q, k, flat, thin,
            flat if bias is None else bias, flat if A_log is None else A_log, *(grads if back else (q, k, flat, thin)),
            *out, sums if back else flat, T, count, *of_q, *of_k, stride, pace, units, gates, eps, lower_bound or 0.0,
            most, HQ=HQ, D=D, C=C, WIDTH=1 if A_log is None else C // A_log.shape[0], H=H, RUN=run, BR=tall, BD=wide,
            BT=ELEMENTS // block, BC=block, BE=ELEMENTS, UQ=UQ, UK=UK, UA=UA, UB=UB, BIAS=bias is not None,
            SCALED=A_log is not None, BOUNDED=lower_bound is not None, BACK=back, num_warps=WARPS, tensors="strided",
        )  # fmt: skip
    return (*out, sums)


def forward(q, k, a, b, A_log, bias, lower_bound: float | None, most: float, eps: float) -> tuple[Tensor, ...]:
    """q, k, g ``[B, T, C]`` and β ``[B, T, H]``, the last two fp32; see `prepare.prepare`."""
    return _launch(q, k, a, b, A_log, bias, None, None, None, None, lower_bound, most, eps)[:4]


def backward(
    dq, dk, dg, db, q, k, a, b, A_log, bias, lower_bound: float | None, most: float, eps: float
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, a, b, A_log and bias."""
    *found, sums = _launch(q, k, a, b, A_log, bias, dq, dk, dg, db, lower_bound, most, eps)
    total = sums.sum(0)
    dA = None if A_log is None else total[1].view(A_log.shape[0], -1).sum(1).to(A_log.dtype)
    return *found, dA, None if bias is None else total[0].to(bias.dtype)
