"""The pass that carries the state's gradient through a segment, right to left; the adjoint of `forward`.

With dS the gradient of the state after a chunk and dR that of R = β(V − e^G K S):

    dU = scale · Aᵀ dO + (e^{G_C−G} K) dS,     dR = Mᵀ dU      (additive writes: dV = dU)
    dS ← e^{G_C} dS + scale · (e^G Q)ᵀ dO − (e^G K)ᵀ (β dR)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.intra import gates
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    q, k, do, G, beta, A, M, state, dr, states, leaving, log_a, table, T, NS, NC, N, LENGTH, scale, H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, SUMMARY: tl.constexpr, ALL: tl.constexpr,
    HAS_STATE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One segment, BV columns. SUMMARY: state ← what the segment adds. Otherwise `state` is read and written: dR (or
    dV), the gradient of the state after each chunk, and that of the state entering the piece."""
    NV: tl.constexpr = (V + BV - 1) // BV
    iv = tl.program_id(0) % NV
    s = tl.program_id(0) // NV
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    if SUMMARY and not ALL and first:
        return
    d = tl.arange(0, BK)
    e = iv * BV + tl.arange(0, BV)
    t = tl.arange(0, C)
    row = (b.to(tl.int64) * NS + s) * H + h
    k_ = head(k, b, start, h, T, HK, H, K)
    q_ = head(q, b, start, h, T, HK, H, K)
    do_ = head(do, b, start, h, T, H, H, V)
    dr_ = head(dr, b, start, h, T, H, H, V)
    g_ = head(G, b, start, h, T, H, H, K if DECAY == 2 else 1)
    be_ = head(beta, b, start, h, T, H, H, 1)
    a_ = head(A, b, start, h, T, H, H, C)
    m_ = head(M, b, start, h, T, H, H, C)
    at = d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if not SUMMARY and HAS_STATE:
        S = tl.load(state + row * (K * V) + at, inside, other=0.0)
    causal = t[:, None] <= t[None, :]
    total = tl.zeros([BK], tl.float32) if DECAY == 2 else 0.0
    n = (left + C - 1) // C
    for j in range(n):
        i = n - 1 - j
        c = i * C
        y = tile(q_ + c * (HK * K), t, left - c, d, HK * K, K)
        z = tile(do_ + c * (H * V), t, left - c, e, H * V, V)
        if not SUMMARY:
            at_chunk = ((b.to(tl.int64) * NC + chunk + i) * H + h) * (K * V)
            tl.store(states + at_chunk + at, S.to(y.dtype), inside)
        if DECAY == 1:
            g = tl.load(g_ + tl.minimum(c + t, left - 1) * H)
            gc = tl.load(g_ + (tl.minimum(c + C, left) - 1) * H)
        if DECAY == 2:
            g = gates(g_ + c * (H * K), t, left - c, d, H * K, K)
            gc = tl.load(g_ + (tl.minimum(c + C, left) - 1) * (H * K) + d, d < K, other=0.0)
            total += gc
        if DELTA or not SUMMARY:
            x = tile(k_ + c * (HK * K), t, left - c, d, HK * K, K)
            xw = (x * tl.exp(gc[None, :] - g)).to(x.dtype) if DECAY == 2 else x
            du = tl.dot(xw, S.to(x.dtype), input_precision=PREC)
            if DECAY == 1:
                du *= tl.exp(gc - g)[:, None]
            if DECAY == 2:
                p = tl.trans(tile(a_ + c * (H * C), t, left - c, t, H * C, C))
                du += tl.dot(p, z, input_precision=PREC) * scale
            else:
                pf = tl.dot(x, tl.trans(y), input_precision=PREC)
                if DECAY == 1:
                    pf *= tl.exp(tl.where(causal, g[None, :] - g[:, None], 0.0))
                p = (tl.where(causal, pf, 0.0) * scale).to(x.dtype)
                du = tl.dot(p, z, du, input_precision=PREC)
            if DELTA:
                m = tl.trans(tile(m_ + c * (H * C), t, left - c, t, H * C, C))
                du = tl.dot(m, du.to(x.dtype), input_precision=PREC)
            if not SUMMARY:
                put(dr_ + c * (H * V), du, t, left - c, e, H * V, V)
        zf = z.to(tl.float32) * scale
        if DECAY == 1:
            S *= tl.exp(gc)
            zf *= tl.exp(g)[:, None]
        if DECAY == 2:
            S *= tl.exp(gc)[:, None]
            y = (y * tl.exp(g)).to(y.dtype)
        S = tl.dot(tl.trans(y), zf.to(y.dtype), S, input_precision=PREC)
        if DELTA:
            be = tl.load(be_ + (c + t) * H, c + t < left, other=0.0).to(tl.float32)
            dv = -du * be[:, None]
            if DECAY == 1:
                dv *= tl.exp(g)[:, None]
            xd = (x * tl.exp(g)).to(x.dtype) if DECAY == 2 else x
            S = tl.dot(tl.trans(xd), dv.to(x.dtype), S, input_precision=PREC)
    if SUMMARY:
        tl.store(state + row * (K * V) + at, S, inside)
        if DECAY == 2 and not DELTA and iv == 0:
            tl.store(log_a + row * K + d, total, d < K)
    elif first:
        tl.store(leaving + ((b.to(tl.int64) * N + piece) * H + h) * (K * V) + at, S, inside)
