"""What spans of additive writes under a scalar decay or none add to the state (see `attend`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs, SpanMaps
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.scalar_decay.operands import Gates, columns, constant, rows, shared_constants, take, tiles
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import SUMMARISE
from ring_la.kernels.triton.horizon import remembered, remembered_constant
from ring_la.kernels.triton.tiles import SIZES, span


@triton.jit(do_not_specialize=SIZES)
def summarise_kernel(
    Y, Z, F, b_, log_a, table, T, NS, NC, LENGTH, scale, H: tl.constexpr, HY: tl.constexpr,
    HZ: tl.constexpr, DY: tl.constexpr, DZ: tl.constexpr, BY: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    GATED: tl.constexpr, STATIC: tl.constexpr, REVERSE: tl.constexpr, ALL: tl.constexpr, BULK: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What a span adds to the state, b [B, NS, H, DY, DZ], and its log-decay; not ALL: leave out the scan's last.
    Chunks of which the decay leaves nothing (see `horizon`) are not read."""
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    iz = tl.program_id(0) % NZ
    s = tl.program_id(0) // NZ
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, _, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    if not ALL and (first if REVERSE else last):
        return
    d = tl.arange(0, BY)
    e = iz * BZ + tl.arange(0, BZ)
    t = tl.arange(0, C)
    y_, ry, cy = rows(Y, b, start, h, T, HY, H, DY, BULK)
    z_, rz, cz = rows(Z, b, start, h, T, HZ, H, DZ, BULK)
    f_ = F + ((b.to(tl.int64) * NC + chunk) * H + h) * (4 * C)
    row = (b.to(tl.int64) * NS + s) * H + h
    at = d[None, :] * DZ + e[:, None]
    inside = (d < DY)[None, :] & (e < DZ)[:, None]
    S = tl.zeros([BZ, BY], tl.float32)
    total = 0.0
    gc = 0.0
    n = (left + C - 1) // C
    count = n
    STEP: tl.constexpr = H * 4 * C
    if STATIC:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
        count = remembered_constant(rate * C, n)
        total = rate * left
    elif GATED:
        if REVERSE:
            count, _, total = remembered(f_ + C - 1, STEP, n)
        else:
            count, _, total = remembered(f_ + (n - 1) * STEP + C - 1, -STEP, n)
        gc = tl.load(f_ + (count - 1 if REVERSE else n - count) * STEP + C - 1)
    for j in range(count):
        i = count - 1 - j if REVERSE else n - count + j
        c = i * C
        y = take(Y, y_, ry, cy, c, t, left, d, 0, HY * DY, DY, BULK)
        z = take(Z, z_, rz, cz, c, t, left, e, iz * BZ, HZ * DZ, DZ, BULK)
        zw = tl.trans(z)
        following = gc
        if STATIC:
            level, rest, gc = constant(rate, scale, tl.minimum(left - c, C), t)
            keep = level if REVERSE else rest
        elif GATED:
            following = tl.load(f_ + (tl.maximum(i - 1, 0) if REVERSE else tl.minimum(i + 1, n - 1)) * STEP + C - 1)
            keep = tl.load(f_ + i * STEP + (C if REVERSE else 2 * C) + t)
        if GATED:
            zw = (zw.to(tl.float32) * keep[None, :]).to(z.dtype)
            S *= tl.exp2(gc)
            gc = following
        S = tl.dot(zw, y, S, input_precision=PREC)
    if REVERSE and not GATED:
        S *= scale
    tl.store(b_ + row * (DY * DZ) + at, S, inside)
    if GATED and iz == 0:
        tl.store(log_a + row, total)


def maps_of_spans(plan: SpanPlan, gates: Gates, inputs: Inputs, all: bool) -> SpanMaps:
    """What each span adds to the state, and its log-decay."""
    return _maps(plan, gates, (inputs.k, inputs.v), 1.0, False, all)


def maps_back(plan: SpanPlan, gates: Gates, q: Tensor, do: Tensor, all: bool) -> SpanMaps:
    """The same right to left, for the gradient `do` of the output."""
    return _maps(plan, gates, (q, do), plan.scale, True, all)


def _maps(
    plan: SpanPlan, gates: Gates, pair: tuple[Tensor, Tensor], scale: float, reverse: bool, all: bool
) -> SpanMaps:
    how, spans, (y, z), (_, T, _, _, K, V) = plan.pick(SUMMARISE), plan.spans, pair, plan.sizes
    block, wide, own = min(how.block, columns(V)), columns(K), plan.states_of_spans()
    log_decay = plan.new(*own.shape[:3]) if gates.present else None
    launch(
        summarise_kernel, (cdiv(V, block) * spans.count, plan.rows),
        *filled(tiles(plan, y, wide), tiles(plan, z, block), gates.read, own, log_decay), spans.table, T, spans.count,
        plan.chunk_count, spans.length, scale, HY=y.shape[2], HZ=z.shape[2], DY=K, DZ=V, BY=wide, BZ=block,
        GATED=gates.present, STATIC=gates.constant, REVERSE=reverse, ALL=all, **shared_constants(plan), **how.options,
    )  # fmt: skip
    return SpanMaps(plan.rule.transition, own, log_decay, all)
