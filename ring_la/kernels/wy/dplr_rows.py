"""`dplr_products` of which no row depends on a later token (see `diagonal_rows`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.triton.gates import running
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.dplr_products import gates_before, launched
from ring_la.kernels.wy.inverse import invert
from ring_la.kernels.wy.levels import START as REFERENCE
from ring_la.kernels.wy.levels import gates_at, level_border, level_mask, near_start, nearest, reach, row_of
from ring_la.kernels.wy.saved import ChunkProducts


@triton.jit(do_not_specialize=SIZES)
def dplr_rows_kernel(
    q, k, a, b, g_, G, Ab, Ak, L, M, qr_, ar_, bw_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    START: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What `dplr_products_kernel` and `dplr_levels_kernel` compute, in one launch (cf. `rows_kernel`)."""
    s = tl.program_id(0)
    i_b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    at = entry(i_b, start, h, T, H) * K
    G_ = G + at
    dt = k.dtype.element_ty
    qb = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    own_b = tl.zeros([C], tl.float32)
    own_k = tl.zeros([C], tl.float32)
    least = LEVELS
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        g = running(tile(g_ + at, t, n, d, H * K, K), C, PREC)  # past the chunk's end the sum stays what it was
        put(G_, g, t, n, d, H * K, K)
        tl.debug_barrier()  # other threads read it
        gp = gates_before(g, G_, t, n, d, H * K, K)
        xq = tile(head(q, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        xa = tile(a + at, t, n, d, H * K, K)
        yk = tile(head(k, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        yb = tile(b + at, t, n, d, H * K, K)
        own_k += tl.sum(xq.to(tl.float32) * yk.to(tl.float32), 1)
        own_b += tl.sum(xq.to(tl.float32) * yb.to(tl.float32), 1)
        near = near_start(g, t, START)
        levels = tl.max(tl.where(near, 0, LEVELS), 0)
        w = tl.exp2(row_of(g, t, C - 1)[None, :] - g)
        put(kw_ + at, yk * w, t, n, d, H * K, K)
        put(bw_ + at, yb * w, t, n, d, H * K, K)
        w = tl.exp2(tl.minimum(-g, START))
        kx = tl.trans(nearest(yk * w, PREC))
        bx = tl.trans(nearest(yb * w, PREC))
        xw = xq * tl.exp2(g)
        put(qr_ + at, xw, t, n, d, H * K, K)
        xw = nearest(tl.where(near[:, None], xw, 0.0), PREC)
        qk = tl.dot(xw, kx, qk, input_precision=PREC)
        qb = tl.dot(xw, bx, qb, input_precision=PREC)
        xw = xa * tl.exp2(gp)
        put(ar_ + at, xw, t, n, d, H * K, K)
        xw = nearest(tl.where(near[:, None], xw, 0.0), PREC)
        ak = tl.dot(xw, kx, ak, input_precision=PREC)
        ab = tl.dot(xw, bx, ab, input_precision=PREC)
        for i in range(0, levels):
            ref = gates_at(G_, level_border(t, n, i), d, H * K, K)
            mask = level_mask(t, i) & (near == 0)[:, None]
            w = tl.exp2(-tl.abs(g - ref))
            kx = tl.trans((yk * w).to(dt))
            bx = tl.trans((yb * w).to(dt))
            xw = (xq * w).to(dt)
            qk += tl.where(mask, tl.dot(xw, kx, input_precision=PREC), 0.0)
            qb += tl.where(mask, tl.dot(xw, bx, input_precision=PREC), 0.0)
            xw = (xa * tl.exp2(-tl.abs(gp - ref))).to(dt)
            ak += tl.where(mask, tl.dot(xw, kx, input_precision=PREC), 0.0)
            ab += tl.where(mask, tl.dot(xw, bx, input_precision=PREC), 0.0)
        least = tl.minimum(least, reach(g, G_, t, n, d, H * K, K, LEVELS, LIMIT))
    tl.store(low_ + entry(i_b, s, h, NC, H), least)
    strict = t[:, None] > t[None, :]
    same = t[:, None] == t[None, :]
    qb = tl.where(strict, qb, tl.where(same, own_b[:, None], 0.0))
    qk = tl.where(strict, qk, tl.where(same, own_k[:, None], 0.0))
    put(head(Ab, i_b, start, h, T, H, H, C), qb * scale, t, n, t, H * C, C)
    put(head(Ak, i_b, start, h, T, H, H, C), qk * scale, t, n, t, H * C, C)
    put(head(L, i_b, start, h, T, H, H, C), tl.where(strict, ak, 0.0), t, n, t, H * C, C)
    put(head(M, i_b, start, h, T, H, H, C), invert(tl.where(strict, -ab, 0.0), C, PREC), t, n, t, H * C, C)


def dplr_rows(plan: SpanPlan, inputs: Inputs) -> ChunkProducts:
    """`dplr_products`, for an output and its gradients."""
    q, k, _, g, _, a, b = inputs
    found, out, where, grid, constants = launched(plan, inputs)
    launch(
        dplr_rows_kernel, grid, q, k, a, b, g, *out, *where, **constants, START=REFERENCE, num_warps=4, num_stages=1
    )
    return found
