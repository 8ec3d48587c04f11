"""The short convolution block by block, each behind the W − 1 rows before it: ``z_t = Σ_j w_j x_{t−W+1+j} + bias``.

Backwards a block gives its own rows' gradients, its lead's, and its part of the weight's, each in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fixed.product import unit_of
from ring_la.kernels.runtime.launch import aligned, filled, launch
from ring_la.kernels.spans.table import cdiv

BLOCK = 64
"""Tokens of a block."""
FORWARD, SLOPES, BACK = (32, 4), (32, 4), (32, 4)
"""Channels of a program and its warps, of each kernel."""


@triton.jit
def rows_before(x, lead, start, stop, t, d, D, W: tl.constexpr):
    """Rows `t`, counted from a block's first, of which −W + 1 … −1 are its lead's: [rows, channels], fp32."""
    own = ((t >= 0) & (start + t < stop))[:, None] & (d < D)[None, :]
    y = tl.load(x + (start + t).to(tl.int64)[:, None] * D + d[None, :], own, other=0.0)
    before = (t < 0)[:, None] & (d < D)[None, :]
    z = tl.load(lead + (t + W - 1).to(tl.int64)[:, None] * D + d[None, :], before, other=0.0)
    return tl.where((t < 0)[:, None], z, y).to(tl.float32)


@triton.jit
def before_silu(x, lead, w, bias, start, stop, t, d, D, W: tl.constexpr, BIAS: tl.constexpr):
    """z of rows `t`."""
    z = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(w + d * W + j, d < D, other=0.0).to(tl.float32)
        z += tap[None, :] * rows_before(x, lead, start, stop, t - (W - 1) + j, d, D, W)
    if BIAS:
        z += tl.load(bias + d, d < D, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=("D",))
def conv_forward_kernel(
    x, lead, w, bias, places, o, D, W: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    D *= UNIT
    n, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    start, stop = tl.load(places + n * 2), tl.load(places + n * 2 + 1)
    t = tl.arange(0, BT)
    z = before_silu(x, lead + n.to(tl.int64) * (W - 1) * D, w, bias, start, stop, t, d, D, W, BIAS)
    if SILU:
        z = z * tl.sigmoid(z)
    live = (start + t < stop)[:, None] & (d < D)[None, :]
    tl.store(o + (start + t).to(tl.int64)[:, None] * D + d[None, :], z.to(o.dtype.element_ty), live)


@triton.jit(do_not_specialize=("D",))
def slope_kernel(
    x, lead, w, bias, places, do, dz, sums, D, W: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dz ``[blocks, 64, D]``, zero behind a block's end, and what the block gives to the weight and the bias
    ``[blocks, W + 1, D]``."""
    D *= UNIT
    n, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    start, stop = tl.load(places + n * 2), tl.load(places + n * 2 + 1)
    t = tl.arange(0, BT)
    lead += n.to(tl.int64) * (W - 1) * D
    live = (start + t < stop)[:, None] & (d < D)[None, :]
    g = tl.load(do + (start + t).to(tl.int64)[:, None] * D + d[None, :], live, other=0.0).to(tl.float32)
    if SILU:
        z = before_silu(x, lead, w, bias, start, stop, t, d, D, W, BIAS)
        s = tl.sigmoid(z)
        g *= s * (1 + z * (1 - s))
    tl.store(dz + (n.to(tl.int64) * BT + t)[:, None] * D + d[None, :], g, (d < D)[None, :] & (t >= 0)[:, None])
    out = sums + n.to(tl.int64) * (W + 1) * D + d
    for j in tl.static_range(W):
        y = rows_before(x, lead, start, stop, t - (W - 1) + j, d, D, W)
        tl.store(out + j * D, tl.sum(g * y, 0), d < D)
    tl.store(out + W * D, tl.sum(g, 0), d < D)


@triton.jit(do_not_specialize=("D",))
def conv_back_kernel(
    dz, w, places, dx, dlead, D, W: tl.constexpr, UNIT: tl.constexpr, WP: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """The gradients of a block's rows and, W − 1 of them, of its lead: ``Σ_j w_j dz_{t+W−1−j}``."""
    D *= UNIT
    n, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    start, stop = tl.load(places + n * 2), tl.load(places + n * 2 + 1)
    t, early = tl.arange(0, BT), tl.arange(0, WP) - (W - 1)
    own = tl.zeros([BT, BD], tl.float32)
    led = tl.zeros([WP, BD], tl.float32)
    dz += n.to(tl.int64) * BT * D + d[None, :]
    for j in tl.static_range(W):
        tap = tl.load(w + d * W + j, d < D, other=0.0).to(tl.float32)[None, :]
        i = (t + W - 1 - j)[:, None]
        own += tap * tl.load(dz + i.to(tl.int64) * D, (i < BT) & (d < D)[None, :], other=0.0)
        i = (early + W - 1 - j)[:, None]
        led += tap * tl.load(dz + i.to(tl.int64) * D, (i >= 0) & (i < BT) & (d < D)[None, :], other=0.0)
    at = dx + (start + t).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, own.to(dx.dtype.element_ty), (start + t < stop)[:, None] & (d < D)[None, :])
    at = dlead + (n.to(tl.int64) * (W - 1) + tl.arange(0, WP))[:, None] * D + d[None, :]
    tl.store(at, led.to(dlead.dtype.element_ty), (early < 0)[:, None] & (d < D)[None, :])


def block_conv(x: Tensor, lead: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, silu: bool) -> Tensor:
    """o like ``x [rows, D]``, of blocks at `places` (int32 ``[blocks, 2]``) behind ``lead [blocks, W − 1, D]``."""
    x, lead, weight = aligned(x), aligned(lead.to(x.dtype)), aligned(weight)
    o, D, W = torch.empty_like(x), x.shape[-1], weight.shape[1]
    unit = unit_of(D)
    if len(places):
        launch(
            conv_forward_kernel, (len(places), cdiv(D, FORWARD[0])), *filled(x, lead, weight, bias), places, o,
            D // unit, W=W, UNIT=unit, BT=BLOCK, BD=FORWARD[0], SILU=silu, BIAS=bias is not None, num_warps=FORWARD[1],
        )  # fmt: skip
    return o


def block_conv_gradients(
    do: Tensor, x: Tensor, lead: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and the leads, and blocks' parts of the weight's and the bias's, fp32 ``[blocks, W+1, D]``."""
    do, x, lead, weight = aligned(do), aligned(x), aligned(lead.to(x.dtype)), aligned(weight)
    D, W, count = x.shape[-1], weight.shape[1], len(places)
    dx, dlead = torch.empty_like(x), torch.empty_like(lead)
    sums, dz = (torch.empty(count, n, D, device=x.device) for n in (W + 1, BLOCK))
    if count:
        (wide, warps), unit = SLOPES, unit_of(D)
        launch(
            slope_kernel, (count, cdiv(D, wide)), *filled(x, lead, weight, bias), places, do, dz, sums, D // unit, W=W,
            UNIT=unit, BT=BLOCK, BD=wide, SILU=silu, BIAS=bias is not None, num_warps=warps,
        )  # fmt: skip
        wide, warps = BACK
        launch(
            conv_back_kernel, (count, cdiv(D, wide)), dz, weight, places, dx, dlead if W > 1 else dx, D // unit, W=W,
            UNIT=unit, WP=1 << max(0, W - 2).bit_length() if W > 1 else 1, BT=BLOCK, BD=wide, num_warps=warps,
        )  # fmt: skip
    return dx, dlead, sums
