"""`dplr_products` of which no row depends on a later token (see `diagonal_rows`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import PRODUCTS_DIAGONAL
from ring_la.kernels.triton.gates import running
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.dplr_products import gates_before, launched
from ring_la.kernels.wy.inverse import invert
from ring_la.kernels.wy.levels import START as REFERENCE
from ring_la.kernels.wy.levels import (
    gates_at,
    level_border,
    level_mask,
    near_start,
    nearest,
    reach,
    row_of,
    spread_of,
)
from ring_la.kernels.wy.saved import ChunkProducts


@triton.jit(do_not_specialize=SIZES)
def dplr_rows_kernel(
    q, k, a, b, g_, G, Ab, Ak, L, M, qr_, ar_, bw_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    START: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """`dplr_products_kernel` with the chunk's start as reference (cf. `rows_kernel`)."""
    s = tl.program_id(0)
    i_b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    at = entry(i_b, start, h, T, H) * K
    qb = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    own_b = tl.zeros([C], tl.float32)
    own_k = tl.zeros([C], tl.float32)
    spread = 0.0
    half = tl.minimum(C // 2, n - 1)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        gate = tile(g_ + at, t, n, d, H * K, K)
        g = running(gate, C, PREC)  # past the chunk's end the sum stays what it was
        put(G + at, g, t, n, d, H * K, K)
        near = near_start(g, START)
        spread = tl.maximum(spread, spread_of(g, near, t, half, LIMIT))
        before = tl.where((t == 0)[:, None], 0.0, g - gate.to(tl.float32) * 1.4426950408889634)
        x = tile(head(q, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        y = tile(head(k, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        z = tile(b + at, t, n, d, H * K, K)
        xf = x.to(tl.float32)
        own_k += tl.sum(xf * y.to(tl.float32), 1)
        own_b += tl.sum(xf * z.to(tl.float32), 1)
        w = tl.exp2(row_of(g, t, C - 1)[None, :] - g)
        put(kw_ + at, y * w, t, n, d, H * K, K)
        put(bw_ + at, z * w, t, n, d, H * K, K)
        w = tl.exp2(tl.minimum(-g, START))
        yw = tl.trans(nearest(y * w, PREC))
        zw = tl.trans(nearest(z * w, PREC))
        xw = xf * tl.exp2(g)
        put(qr_ + at, xw, t, n, d, H * K, K)
        xw = nearest(tl.where(near[:, None], xw, 0.0), PREC)
        qk = tl.dot(xw, yw, qk, input_precision=PREC)
        qb = tl.dot(xw, zw, qb, input_precision=PREC)
        xw = tile(a + at, t, n, d, H * K, K) * tl.exp2(before)
        put(ar_ + at, xw, t, n, d, H * K, K)
        xw = nearest(tl.where(near[:, None], xw, 0.0), PREC)
        ak = tl.dot(xw, yw, ak, input_precision=PREC)
        ab = tl.dot(xw, zw, ab, input_precision=PREC)
    tl.store(low_ + entry(i_b, s, h, NC, H), tl.where(spread <= LIMIT, LEVELS, -1))
    strict = t[:, None] > t[None, :]
    same = t[:, None] == t[None, :]
    qb = tl.where(strict, qb, tl.where(same, own_b[:, None], 0.0))
    qk = tl.where(strict, qk, tl.where(same, own_k[:, None], 0.0))
    put(head(Ab, i_b, start, h, T, H, H, C), qb * scale, t, n, t, H * C, C)
    put(head(Ak, i_b, start, h, T, H, H, C), qk * scale, t, n, t, H * C, C)
    put(head(L, i_b, start, h, T, H, H, C), tl.where(strict, ak, 0.0), t, n, t, H * C, C)
    put(head(M, i_b, start, h, T, H, H, C), invert(tl.where(strict, -ab, 0.0), C, PREC), t, n, t, H * C, C)


@triton.jit(do_not_specialize=SIZES)
def dplr_far_rows_kernel(
    q, k, a, b, G, Ab, Ak, L, M, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, START: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """All levels of the chunks that `dplr_rows_kernel` left (cf. `far_rows_kernel`)."""
    s = tl.program_id(0)
    i_b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low_ += entry(i_b, s, h, NC, H)
    if tl.load(low_) >= 0:
        return
    t = tl.arange(0, C)
    dt = k.dtype.element_ty
    at = entry(i_b, start, h, T, H) * K
    G_ = G + at
    qb = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    same = t[:, None] == t[None, :]
    near = tl.zeros([C], tl.int32)
    least = LEVELS
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        xq = tile(head(q, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        yk = tile(head(k, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        xa = tile(a + at, t, n, d, H * K, K)
        yb = tile(b + at, t, n, d, H * K, K)
        g = gates_at(G_, tl.minimum(t, n - 1), d, H * K, K)
        gp = gates_before(G_, t, n, d, H * K, K)
        qk += tl.where(same, tl.sum(xq.to(tl.float32) * yk.to(tl.float32), 1)[:, None], 0.0)
        qb += tl.where(same, tl.sum(xq.to(tl.float32) * yb.to(tl.float32), 1)[:, None], 0.0)
        least = tl.minimum(least, reach(g, G_, t, n, d, H * K, K, LEVELS, LIMIT))
        near += near_start(g, START).to(tl.int32)
        for i in range(0, LEVELS):
            ref = gates_at(G_, level_border(t, n, i), d, H * K, K)
            mask = level_mask(t, i)
            w = tl.exp2(-tl.abs(g - ref))
            q_ = (xq * w).to(dt)
            a_ = (xa * tl.exp2(-tl.abs(gp - ref))).to(dt)
            k_ = tl.trans((yk * w).to(dt))
            b_ = tl.trans((yb * w).to(dt))
            qk += tl.where(mask, tl.dot(q_, k_, input_precision=PREC), 0.0)
            qb += tl.where(mask, tl.dot(q_, b_, input_precision=PREC), 0.0)
            ak += tl.where(mask, tl.dot(a_, k_, input_precision=PREC), 0.0)
            ab += tl.where(mask, tl.dot(a_, b_, input_precision=PREC), 0.0)
    tl.store(low_, least)
    rows = tl.where(near == (K + BK - 1) // BK, C, t)  # beyond the chunk: not stored
    put(head(Ab, i_b, start, h, T, H, H, C), qb * scale, rows, n, t, H * C, C)
    put(head(Ak, i_b, start, h, T, H, H, C), qk * scale, rows, n, t, H * C, C)
    put(head(L, i_b, start, h, T, H, H, C), ak, rows, n, t, H * C, C)
    put(head(M, i_b, start, h, T, H, H, C), invert(-ab, C, PREC), rows, n, t, H * C, C)


def dplr_rows(plan: SpanPlan, inputs: Inputs) -> ChunkProducts:
    """`dplr_products`, for an output and its gradients."""
    q, k, _, g, _, a, b = inputs
    found, out, where, grid, constants = launched(plan, inputs)
    constants, (G, Ab, Ak, L, M, *_, low) = constants | dict(START=REFERENCE), out
    options = plan.pick(PRODUCTS_DIAGONAL).options
    launch(dplr_rows_kernel, grid, q, k, a, b, g, *out, *where, **constants, **options)
    again = q, k, a, b, G, Ab, Ak, L, M, low
    launch(dplr_far_rows_kernel, grid, *again, *where, **constants, num_warps=4, num_stages=1)
    return found
