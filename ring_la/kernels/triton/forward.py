"""The pass that carries the state through a segment, for delta writes and for a decay per key channel.

Over a chunk of C tokens with the state S before it, G the running log-decay, A and M from `intra`:

    U = M β (V − e^G K S)      (additive writes: U = V)
    O = scale · (e^G Q S + A U)
    S ← e^{G_C} S + (e^{G_C−G} K)ᵀ U

A segment's own map is found by the same pass: b from S = 0, and the dense transition's columns from V = 0 and S = I.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.intra import gates
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, G, beta, A, M, state, o, u, states, leaving, trans, log_a, table, T, NS, NC, N, LENGTH, scale, H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, SUMMARY: tl.constexpr, ALL: tl.constexpr,
    OUT: tl.constexpr, KEEP: tl.constexpr, HAS_STATE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One segment, BV columns of the state.

    SUMMARY: state ← b and, by the programs beyond V's columns, trans ← A; ALL: also what no later segment of this
    launch needs. Otherwise `state` is read, OUT writes o and the piece's last state, KEEP writes U and the state
    before each chunk. DECAY: 0 none, 1 scalar, 2 per key channel.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    COLUMNS: tl.constexpr = NV + ((K + BV - 1) // BV if SUMMARY and DELTA else 0)
    iv = tl.program_id(0) % COLUMNS
    s = tl.program_id(0) // COLUMNS
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    eye = iv >= NV
    if SUMMARY and not ALL:
        if last or (eye and first):
            return
    d = tl.arange(0, BK)
    e = (iv - NV if eye else iv) * BV + tl.arange(0, BV)
    t = tl.arange(0, C)
    ncol = tl.where(eye, 0, V)
    row = (b.to(tl.int64) * NS + s) * H + h
    k_ = head(k, b, start, h, T, HK, H, K)
    q_ = head(q, b, start, h, T, HK, H, K)
    v_ = head(v, b, start, h, T, H, H, V)
    g_ = head(G, b, start, h, T, H, H, K if DECAY == 2 else 1)
    be_ = head(beta, b, start, h, T, H, H, 1)
    a_ = head(A, b, start, h, T, H, H, C)
    m_ = head(M, b, start, h, T, H, H, C)
    at = d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if SUMMARY:
        S += tl.where(eye & (d[:, None] == e[None, :]), 1.0, 0.0)
    elif HAS_STATE:
        S = tl.load(state + row * (K * V) + at, inside, other=0.0)
    causal = t[:, None] >= t[None, :]
    total = tl.zeros([BK], tl.float32) if DECAY == 2 else 0.0
    for i in range((left + C - 1) // C):
        c = i * C
        x = tile(k_ + c * (HK * K), t, left - c, d, HK * K, K)
        w = tl.load(v_ + (c + t)[:, None] * (H * V) + e[None, :], (c + t < left)[:, None] & (e < ncol)[None, :], other=0.0)
        Sx = S.to(x.dtype)
        if KEEP:
            at_chunk = ((b.to(tl.int64) * NC + chunk + i) * H + h) * (K * V)
            tl.store(states + at_chunk + at, Sx, inside)
        if DECAY == 1:
            g = tl.load(g_ + tl.minimum(c + t, left - 1) * H)
            gc = tl.load(g_ + (tl.minimum(c + C, left) - 1) * H)
        if DECAY == 2:
            g = gates(g_ + c * (H * K), t, left - c, d, H * K, K)
            gc = tl.load(g_ + (tl.minimum(c + C, left) - 1) * (H * K) + d, d < K, other=0.0)
            total += gc
        if DELTA:
            xd = (x * tl.exp(g)).to(x.dtype) if DECAY == 2 else x
            r = tl.dot(xd, Sx, input_precision=PREC)
            if DECAY == 1:
                r *= tl.exp(g)[:, None]
            be = tl.load(be_ + (c + t) * H, c + t < left, other=0.0).to(tl.float32)
            r = (w.to(tl.float32) - r) * be[:, None]
            m = tile(m_ + c * (H * C), t, left - c, t, H * C, C)
            uf = tl.dot(m, r.to(x.dtype), input_precision=PREC)
            ux = uf.to(x.dtype)
            if KEEP:
                u_ = head(u, b, start, h, T, H, H, V)
                put(u_ + c * (H * V), ux, t, left - c, e, H * V, V)
        else:
            ux = w
        if OUT:
            y = tile(q_ + c * (HK * K), t, left - c, d, HK * K, K)
            if DECAY == 2:
                y = (y * tl.exp(g)).to(x.dtype)
                p = tile(a_ + c * (H * C), t, left - c, t, H * C, C)
                acc = tl.dot(y, Sx, input_precision=PREC)
            else:
                pf = tl.dot(y, tl.trans(x), input_precision=PREC)
                acc = tl.dot(y, Sx, input_precision=PREC)
                if DECAY == 1:
                    pf *= tl.exp(tl.where(causal, g[:, None] - g[None, :], 0.0))
                    acc *= tl.exp(g)[:, None]
                p = tl.where(causal, pf, 0.0).to(x.dtype)
            acc = tl.dot(p, ux, acc, input_precision=PREC)
            o_ = head(o, b, start, h, T, H, H, V)
            put(o_ + c * (H * V), acc * scale, t, left - c, e, H * V, V)
        if DECAY == 1:
            S *= tl.exp(gc)
            ux = (ux.to(tl.float32) * tl.exp(gc - g)[:, None]).to(x.dtype)
        if DECAY == 2:
            S *= tl.exp(gc)[:, None]
            x = (x * tl.exp(gc[None, :] - g)).to(x.dtype)
        S = tl.dot(tl.trans(x), ux, S, input_precision=PREC)
    if SUMMARY:
        if eye:
            tl.store(trans + row * (K * K) + d[:, None] * K + e[None, :], S, (d < K)[:, None] & (e < K)[None, :])
        else:
            tl.store(state + row * (K * V) + at, S, inside)
        if DECAY == 2 and not DELTA and iv == 0:
            tl.store(log_a + row * K + d, total, d < K)
    elif OUT and last:
        tl.store(leaving + ((b.to(tl.int64) * N + piece) * H + h) * (K * V) + at, S, inside)
