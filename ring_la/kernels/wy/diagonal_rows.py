"""`diagonal_products` of which no row depends on a later token: what a document's first tokens give is the same whether
or not others stand behind them in their chunk (`kernels.in_order`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import PRODUCTS_DIAGONAL
from ring_la.kernels.triton.gates import chunk_factors, running
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.diagonal_products import launched, put_square
from ring_la.kernels.wy.inverse import invert
from ring_la.kernels.wy.levels import START as REFERENCE
from ring_la.kernels.wy.levels import (
    border_weight,
    gates_at,
    level_mask,
    near_start,
    nearest,
    reach,
    row_of,
    spread_of,
)
from ring_la.kernels.wy.saved import ChunkProducts, fine


@triton.jit(do_not_specialize=SIZES)
def rows_kernel(
    q, k, r, g_, beta, F, G, A, Ar, M, qr_, kr_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    START: tl.constexpr, DELTA: tl.constexpr, ERASE: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """`products_kernel` with the chunk's start as reference; `far_rows_kernel` makes the rows of A and M that it is too
    far from. low, which gradients read, and kw are of the whole chunk."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    at = entry(b, start, h, T, H) * K
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    spread = 0.0
    half = tl.minimum(C // 2, n - 1)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        g = running(tile(g_ + at, t, n, d, H * K, K), C, PREC)  # past the chunk's end the sum stays what it was
        put(G + at, g, t, n, d, H * K, K)
        near = near_start(g, START)
        spread = tl.maximum(spread, spread_of(g, near, t, half, LIMIT))
        x = tile(q_, t, n, d, HK * K, K).to(k.dtype.element_ty)  # see `plan.query_dtype`
        y = tile(k_, t, n, d, HK * K, K)
        own += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
        put(kw_ + at, y * tl.exp2(row_of(g, t, C - 1)[None, :] - g), t, n, d, H * K, K)
        up = tl.exp2(g)
        inside = tl.where(near[:, None], up, 0.0)
        yw = tl.trans(nearest(y * tl.exp2(tl.minimum(-g, START)), PREC))
        put(qr_ + at, x * up, t, n, d, H * K, K)
        a = tl.dot(nearest(x * inside, PREC), yw, a, input_precision=PREC)
        if DELTA:
            z = tile(head(r, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
            put(kr_ + at, z * up, t, n, d, H * K, K)
            L = tl.dot(nearest(z * inside, PREC), yw, L, input_precision=PREC)
    tl.store(low_ + entry(b, s, h, NC, H), tl.where(spread <= LIMIT, LEVELS, -1))
    a = tl.where(t[:, None] > t[None, :], a, 0.0) + tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
    put_square(A, Ar, a * scale, b, h, start, t, t, n, T, H, C, FINE)
    if DELTA:
        f = F + entry(b, s, h, NC, H) * (4 * C)
        _, be = chunk_factors(g_, beta, f, b.to(tl.int64) * T + start, t, n, h, H, C, False, False)
        L = tl.where(t[:, None] > t[None, :], L * be[:, None], 0.0)
        put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


@triton.jit(do_not_specialize=SIZES)
def far_rows_kernel(
    q, k, r, F, G, A, Ar, M, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, START: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """All levels of the chunks that `rows_kernel` left (low < 0); stores the rows that are not `near_start` by all
    channels, and low, `reach`."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low_ += entry(b, s, h, NC, H)
    if tl.load(low_) >= 0:
        return
    t = tl.arange(0, C)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    G_ = G + entry(b, start, h, T, H) * K
    dt = k.dtype.element_ty
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    near = tl.zeros([C], tl.int32)
    least = LEVELS
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        x = tile(q_, t, n, d, HK * K, K).to(dt)  # see `plan.query_dtype`
        y = tile(k_, t, n, d, HK * K, K)
        g = gates_at(G_, tl.minimum(t, n - 1), d, H * K, K)
        own = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
        a += tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
        z = tile(head(r, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
        least = tl.minimum(least, reach(g, G_, t, n, d, H * K, K, LEVELS, LIMIT))
        near += near_start(g, START).to(tl.int32)
        for i in range(0, LEVELS):
            w = border_weight(g, G_, t, n, d, i, H * K, K)
            mask = level_mask(t, i)
            yw = tl.trans((y * w).to(dt))
            a += tl.where(mask, tl.dot((x * w).to(dt), yw, input_precision=PREC), 0.0)
            if DELTA:
                L += tl.where(mask, tl.dot((z * w).to(dt), yw, input_precision=PREC), 0.0)
    tl.store(low_, least)
    rows = tl.where(near == (K + BK - 1) // BK, C, t)  # beyond the chunk: not stored
    put_square(A, Ar, a * scale, b, h, start, rows, t, n, T, H, C, FINE)
    if DELTA:
        be = tl.load(F + entry(b, s, h, NC, H) * (4 * C) + 3 * C + t)
        L = tl.where(t[:, None] > t[None, :], L * be[:, None], 0.0)
        put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), rows, n, t, H * C, C)


def diagonal_rows(plan: SpanPlan, inputs: Inputs) -> ChunkProducts:
    """`diagonal_products`, for an output and its gradients."""
    q, k, _, g, beta, reads, _ = inputs
    found, out, where, grid, constants = launched(plan, inputs, fine(plan))
    constants, (factors, G, A, rest, M, *_, low) = constants | dict(START=REFERENCE), out
    options = plan.pick(PRODUCTS_DIAGONAL).options
    launch(rows_kernel, grid, *filled(q, k, reads, g, beta, *out), *where, **constants, **options)
    again = filled(q, k, reads, factors, G, A, rest, M, low)
    launch(far_rows_kernel, grid, *again, *where, **constants, num_warps=4, num_stages=1)
    return found
