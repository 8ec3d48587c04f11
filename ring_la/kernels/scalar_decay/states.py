"""The states between the chunks of additive writes, for what is made of all chunks at once (`chunk_gradients`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.scalar_decay.operands import (
    Gates,
    chunk_states,
    columns,
    constant,
    rows,
    shared_constants,
    state_tiles,
    take,
    tiles,
)
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import STATES
from ring_la.kernels.triton.tiles import SIZES, span


@triton.jit(do_not_specialize=SIZES)
def states_kernel(
    X, Y, F, entering, states, leaving, table, T, NS, NC, N, LENGTH, scale, H: tl.constexpr, HX: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STATIC: tl.constexpr,
    REVERSE: tl.constexpr, HAS_STATE: tl.constexpr, BULK: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One span, BK channels of X: `states` [B, NC, H, K, V] before every chunk, in the scan's direction, from those
    `entering` the spans. X, Y are k, v, or REVERSE q, do, and then `leaving` takes the last state of each piece.
    F and STATIC as for `attend.attend_kernel`, under a decay."""
    NK: tl.constexpr = (K + BK - 1) // BK
    ik = tl.program_id(0) % NK
    s = tl.program_id(0) // NK
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, _ = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    d = ik * BK + tl.arange(0, BK)
    e = tl.arange(0, BV)
    t = tl.arange(0, C)
    x_, rx, cx = rows(X, b, start, h, T, HX, H, K, BULK)
    y_, ry, cy = rows(Y, b, start, h, T, H, H, V, BULK)
    f_ = F + ((b.to(tl.int64) * NC + chunk) * H + h) * (4 * C)
    at = d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_STATE:
        row = (b.to(tl.int64) * NS + s) * H + h
        S = tl.load(entering + row * (K * V) + at, inside, other=0.0)
    n = (left + C - 1) // C
    gc = 0.0
    if STATIC:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
    else:
        gc = tl.load(f_ + (n - 1 if REVERSE else 0) * (H * 4 * C) + C - 1)
    for j in range(n):
        i = n - 1 - j if REVERSE else j
        c = i * C
        x = take(X, x_, rx, cx, c, t, left, d, ik * BK, HX * K, K, BULK)
        y = take(Y, y_, ry, cy, c, t, left, e, 0, H * V, V, BULK)
        xw = tl.trans(x).to(tl.float32)
        following = gc
        if STATIC:
            level, rest, gc = constant(rate, scale, tl.minimum(left - c, C), t)
            keep = level if REVERSE else rest
        else:
            m = tl.maximum(i - 1, 0) if REVERSE else tl.minimum(i + 1, n - 1)
            following = tl.load(f_ + m * (H * 4 * C) + C - 1)
            keep = tl.load(f_ + i * (H * 4 * C) + (C if REVERSE else 2 * C) + t)
        place = (b * NC + chunk + i) * H + h
        if BULK:
            states.store([place * K, 0] if NK == 1 else [place * K + ik * BK, 0], S.to(x.dtype))
        else:
            tl.store(states + place.to(tl.int64) * (K * V) + at, S.to(x.dtype), inside)
        S *= tl.exp2(gc)
        S = tl.dot((xw * keep[None, :]).to(x.dtype), y, S, input_precision=PREC)
        gc = following
    if REVERSE:
        if first:
            own = ((b.to(tl.int64) * N + piece) * H + h) * (K * V)
            tl.store(leaving + own + at, S, inside)


def states_before_chunks(plan: SpanPlan, gates: Gates, k: Tensor, v: Tensor, entering: Tensor | None) -> Tensor:
    """From those that enter the spans (None: zero)."""
    return _states(plan, gates, (k, v), entering, None)


def adjoints_after_chunks(
    plan: SpanPlan, gates: Gates, q: Tensor, do: Tensor, entering: Tensor | None, dS0: Tensor
) -> Tensor:
    """The gradients of the states after the chunks, from those of the states after the spans; `dS0`: where those of the
    states that enter the pieces go."""
    return _states(plan, gates, (q, do), entering, dS0)


def _states(
    plan: SpanPlan, gates: Gates, pair: tuple[Tensor, Tensor], entering: Tensor | None, leaving: Tensor | None
) -> Tensor:
    how, spans, (x, y), (_, T, _, _, K, V) = plan.pick(STATES), plan.spans, pair, plan.sizes
    block, wide, states = min(how.block, columns(K)), columns(V), chunk_states(plan)
    launch(
        states_kernel, (cdiv(K, block) * spans.count, plan.rows),
        *filled(
            tiles(plan, x, block), tiles(plan, y, wide), gates.read, entering, state_tiles(plan, states, block, wide),
            leaving,
        ),
        spans.table, T, spans.count, plan.chunk_count, spans.pieces, spans.length, plan.scale, HX=x.shape[2], K=K, V=V,
        BK=block, BV=wide, STATIC=gates.constant, REVERSE=leaving is not None, HAS_STATE=entering is not None,
        **shared_constants(plan), **how.options,
    )  # fmt: skip
    return states
