"""A chunk's gradients from what the two passes left: the state before it, S, and the gradient of the one after, dS.

With dA = dO Uᵀ and dE = dR Uᵀ (t ≥ s and t > s), decays e^{G_t−G_s} inside the sums, and k's two roles apart (it is
read against the state, and written to it):

    dq_t      = scale · (e^{G_t} S dO_t + Σ_s dA_ts k_s)
    dk_t read =        e^{G_t} S dR_t + Σ_s dE_ts k_s                       (enters dk with −β_t)
    dk_s write = e^{G_C−G_s} dS U_s + Σ_t scale · dA_ts q_t − Σ_t β_t dE_ts k_t
    dβ_t = dR_t·v_t − k_t·(dk_t read),   dv_t = β_t dR_t
    dG_t = q_t·dq_t − β_t k_t·(dk_t read) − k_t·(dk_t write);   g_t collects G's gradient to the chunk's end and <S', dS>

S' the state after the chunk. Per key channel the same holds channel by channel, and the decayed sums go by `intra`'s
levels. (The identities are the adjoint of the WY form; cf. arXiv:2412.06464, arXiv:2510.26692.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.intra import gates, level_decay, level_mask
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit
def suffix(x):
    """Σ over the rows from each row on."""
    return tl.sum(x, 0)[None, :] - tl.cumsum(x, 0) + x


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    q, k, v, G, beta, do, u, dr, states, adjoints, dq_, dk_, dv_, dg_, dbeta_, table, T, NC, scale, H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One chunk, BK key channels. dq, dk per value head; dβ and a scalar dg per block of channels, [NK, B, T, H]."""
    NK: tl.constexpr = (K + BK - 1) // BK
    ik = tl.program_id(0) % NK
    s = tl.program_id(0) // NK
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, _, _, _, _ = span(table, s, T, C, C, VARLEN)
    n = end - start
    if n <= 0:
        return
    t = tl.arange(0, C)
    d = ik * BK + tl.arange(0, BK)
    dt = q.dtype.element_ty
    do_ = head(do, b, start, h, T, H, H, V)
    u_ = head(u, b, start, h, T, H, H, V)
    v_ = head(v, b, start, h, T, H, H, V)
    r_ = head(dr, b, start, h, T, H, H, V)
    at_chunk = ((b.to(tl.int64) * NC + s) * H + h) * (K * V)
    part = ((ik * (tl.num_programs(1) // H) + b).to(tl.int64) * T + start + t) * H + h

    dq = tl.zeros([C, BK], tl.float32)
    dw = tl.zeros([C, BK], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    dAt = tl.zeros([C, C], tl.float32)
    edge = tl.zeros([BK], tl.float32)
    if DELTA:
        dread = tl.zeros([C, BK], tl.float32)
        dE = tl.zeros([C, C], tl.float32)
        dEt = tl.zeros([C, C], tl.float32)
        dbe = tl.zeros([C], tl.float32)
        be = tl.load(head(beta, b, start, h, T, H, H, 1) + t * H, t < n, other=0.0).to(tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        z = tile(do_, t, n, e, H * V, V)
        ux = tile(u_, t, n, e, H * V, V)
        S = tile(states + at_chunk, d, K, e, V, V)
        dS = tile(adjoints + at_chunk, d, K, e, V, V)
        dq = tl.dot(z, tl.trans(S), dq, input_precision=PREC)
        dw = tl.dot(ux, tl.trans(dS), dw, input_precision=PREC)
        dA = tl.dot(z, tl.trans(ux), dA, input_precision=PREC)
        dAt = tl.dot(ux, tl.trans(z), dAt, input_precision=PREC)
        if DECAY != 0:
            edge += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        if DELTA:
            r = tile(r_, t, n, e, H * V, V)
            dread = tl.dot(r, tl.trans(S), dread, input_precision=PREC)
            dE = tl.dot(r, tl.trans(ux), dE, input_precision=PREC)
            dEt = tl.dot(ux, tl.trans(r), dEt, input_precision=PREC)
            rf = r.to(tl.float32)
            if ik == 0:
                dbe += tl.sum(rf * tile(v_, t, n, e, H * V, V).to(tl.float32), 1)
                put(head(dv_, b, start, h, T, H, H, V), rf * be[:, None], t, n, e, H * V, V)

    x = tile(head(q, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    y = tile(head(k, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    xf = x.to(tl.float32)
    yf = y.to(tl.float32)
    lower = t[:, None] >= t[None, :]
    strict = t[:, None] > t[None, :]
    upper = t[:, None] <= t[None, :]
    above = t[:, None] < t[None, :]
    dAt *= scale
    dA *= scale
    dq *= scale
    if DELTA:
        dEt *= be[None, :]
    if DECAY == 2:
        g_ = head(G, b, start, h, T, H, H, K)
        g = gates(g_, t, n, d, H * K, K)
        gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
        eg = tl.exp(g)
        own = tl.sum(tl.where(t[:, None] == t[None, :], dA, 0.0), 1)[:, None]
        dw *= tl.exp(gc[None, :] - g)
        edge = edge * tl.exp(gc) + tl.sum(yf * dw, 0)
        dq = dq * eg + own * yf
        dw += own * xf
        if DELTA:
            dread *= eg
        for i in tl.static_range(6):
            HALF: tl.constexpr = 1 << i
            if HALF < C:
                w = level_decay(g, g_, t, n, d, HALF, H * K, K)
                xw = (xf * w).to(dt)
                yw = (yf * w).to(dt)
                down = level_mask(t, HALF)
                up = ((t[:, None] // (2 * HALF)) == (t[None, :] // (2 * HALF))) & ((t[:, None] // HALF) % 2 == 0)
                up = up & ((t[None, :] // HALF) % 2 == 1)
                dq += w * tl.dot(tl.where(down, dA, 0.0).to(dt), yw, input_precision=PREC)
                acc = tl.dot(tl.where(up, dAt, 0.0).to(dt), xw, input_precision=PREC)
                if DELTA:
                    acc -= tl.dot(tl.where(up, dEt, 0.0).to(dt), yw, input_precision=PREC)
                    dread += w * tl.dot(tl.where(down, dE, 0.0).to(dt), yw, input_precision=PREC)
                dw += w * acc
    else:
        if DECAY == 1:
            g_ = head(G, b, start, h, T, H, H, 1)
            g = tl.load(g_ + tl.minimum(t, n - 1) * H)
            gc = tl.load(g_ + (n - 1) * H)
            down = tl.exp(tl.where(lower, g[:, None] - g[None, :], 0.0))
            up = tl.exp(tl.where(upper, g[None, :] - g[:, None], 0.0))
            dA *= down
            dAt *= up
            dq *= tl.exp(g)[:, None]
            dw *= tl.exp(gc - g)[:, None]
            total = tl.sum(edge, 0) * tl.exp(gc) + tl.sum(tl.sum(yf * dw, 1), 0)
            if DELTA:
                dE *= down
                dEt *= up
                dread *= tl.exp(g)[:, None]
        dq = tl.dot(tl.where(lower, dA, 0.0).to(dt), y, dq, input_precision=PREC)
        dw = tl.dot(tl.where(upper, dAt, 0.0).to(dt), x, dw, input_precision=PREC)
        if DELTA:
            dread = tl.dot(tl.where(strict, dE, 0.0).to(dt), y, dread, input_precision=PREC)
            dw = tl.dot(tl.where(above, -dEt, 0.0).to(dt), y, dw, input_precision=PREC)

    dG = xf * dq - yf * dw
    dk = dw
    if DELTA:
        dk -= dread * be[:, None]
        dG -= yf * dread * be[:, None]
        tl.store(dbeta_ + part, dbe - tl.sum(yf * dread, 1), t < n)
    put(head(dq_, b, start, h, T, H, H, K), dq, t, n, d, H * K, K)
    put(head(dk_, b, start, h, T, H, H, K), dk, t, n, d, H * K, K)
    if DECAY == 1:
        rows = tl.sum(dG, 1)
        tl.store(dg_ + part, tl.sum(rows, 0) - tl.cumsum(rows, 0) + rows + total, t < n)
    if DECAY == 2:
        put(head(dg_, b, start, h, T, H, H, K), suffix(dG) + edge[None, :], t, n, d, H * K, K)
