"""`diagonal_products` of which no row depends on a later token: what a document's first tokens give is the same whether
or not others stand behind them in their chunk (`kernels.in_order`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.triton.gates import chunk_factors, running
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.diagonal_products import launched, put_square
from ring_la.kernels.wy.inverse import invert
from ring_la.kernels.wy.levels import START as REFERENCE
from ring_la.kernels.wy.levels import border_weight, level_mask, near_start, nearest, reach, row_of
from ring_la.kernels.wy.saved import ChunkProducts, fine


@triton.jit(do_not_specialize=SIZES)
def rows_kernel(
    q, k, r, g_, beta, F, G, A, Ar, M, qr_, kr_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    START: tl.constexpr, DELTA: tl.constexpr, ERASE: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """What `products_kernel` and `levels_kernel` compute, in one launch.

    A row takes the chunk's start as reference where it may (`near_start`), which is one product, else every level. What
    goes to the state, kw, and low, which gradients read, are of the whole chunk.
    """
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    at = entry(b, start, h, T, H) * K
    G_ = G + at
    dt = k.dtype.element_ty
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    least = LEVELS
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        g = running(tile(g_ + at, t, n, d, H * K, K), C, PREC)  # past the chunk's end the sum stays what it was
        put(G_, g, t, n, d, H * K, K)
        tl.debug_barrier()  # other threads read it
        x = tile(q_, t, n, d, HK * K, K).to(dt)  # see `plan.query_dtype`
        y = tile(k_, t, n, d, HK * K, K)
        own += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
        near = near_start(g, t, START)
        levels = tl.max(tl.where(near, 0, LEVELS), 0)
        put(kw_ + at, y * tl.exp2(row_of(g, t, C - 1)[None, :] - g), t, n, d, H * K, K)
        yw = tl.trans(nearest(y * tl.exp2(tl.minimum(-g, START)), PREC))
        up = tl.exp2(g)
        xw = x * up
        put(qr_ + at, xw, t, n, d, H * K, K)
        a = tl.dot(nearest(tl.where(near[:, None], xw, 0.0), PREC), yw, a, input_precision=PREC)
        if DELTA:
            z = tile(head(r, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
            xw = z * up
            put(kr_ + at, xw, t, n, d, H * K, K)
            L = tl.dot(nearest(tl.where(near[:, None], xw, 0.0), PREC), yw, L, input_precision=PREC)
        for i in range(0, levels):
            w = border_weight(g, G_, t, n, d, i, H * K, K)
            mask = level_mask(t, i) & (near == 0)[:, None]
            yw = tl.trans((y * w).to(dt))
            a += tl.where(mask, tl.dot((x * w).to(dt), yw, input_precision=PREC), 0.0)
            if DELTA:
                L += tl.where(mask, tl.dot((z * w).to(dt), yw, input_precision=PREC), 0.0)
        least = tl.minimum(least, reach(g, G_, t, n, d, H * K, K, LEVELS, LIMIT))
    tl.store(low_ + entry(b, s, h, NC, H), least)
    a = tl.where(t[:, None] > t[None, :], a, 0.0) + tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
    put_square(A, Ar, a * scale, b, h, start, t, n, T, H, C, FINE)
    if DELTA:
        f = F + entry(b, s, h, NC, H) * (4 * C)
        _, be = chunk_factors(g_, beta, f, b.to(tl.int64) * T + start, t, n, h, H, C, False, False)
        L = tl.where(t[:, None] > t[None, :], L * be[:, None], 0.0)
        put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


def diagonal_rows(plan: SpanPlan, inputs: Inputs) -> ChunkProducts:
    """`diagonal_products`, for an output and its gradients."""
    q, k, _, g, beta, reads, _ = inputs
    found, out, where, grid, constants = launched(plan, inputs, fine(plan))
    launch(
        rows_kernel, grid, *filled(q, k, reads, g, beta, *out), *where, **constants, START=REFERENCE, num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return found
