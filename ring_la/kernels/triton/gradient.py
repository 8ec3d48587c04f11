"""A chunk's gradients from what the two passes left: the state before it, S, and the gradient of the one after, dS.

With dA = dO Uᵀ and dE = dR Uᵀ (t ≥ s and t > s), decays e^{G_t−G_s} inside the sums, and k's two roles apart (it is
read against the state, and written to it):

    dq_t      = scale · (e^{G_t} S dO_t + Σ_s dA_ts k_s)
    dk_t read =        e^{G_t} S dR_t + Σ_s dE_ts k_s                       (enters dk with −β_t)
    dk_s write = e^{G_C−G_s} dS U_s + Σ_t scale · dA_ts q_t − Σ_t β_t dE_ts k_t
    dβ_t = dR_t·v_t − k_t·(dk_t read),   dv_t = β_t dR_t
    dG_t = q_t·dq_t − β_t k_t·(dk_t read) − k_t·(dk_t write);   g_t collects G's gradient to the chunk's end and <S',
    dS>

S' the state after the chunk. `states` and `adjoints` hold S and dS of every chunk as [V, K]. Per key channel the same
holds channel by channel, and the decayed sums go by `intra`'s
levels. (The identities are the adjoint of the WY form; cf. arXiv:2412.06464, arXiv:2510.26692.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.intra import direct_mask, gates_across, gates_at, level_border, level_mask, middle, reach
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit
def suffix(x):
    """Σ over the rows from each row on."""
    return tl.sum(x, 0)[None, :] - tl.cumsum(x, 0) + x


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    q, k, v, F, G, do, u, dr, states, adjoints, dq_, dk_, dv_, dg_, dbeta_, table, T, NC, scale, H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, LIMIT: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr,
    VARLEN: tl.constexpr,
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
    f = F + ((b.to(tl.int64) * NC + s) * H + h) * (4 * C)
    at_chunk = ((b.to(tl.int64) * NC + s) * H + h) * (K * V)
    part = ((ik * (tl.num_programs(1) // H) + b).to(tl.int64) * T + start + t) * H + h

    dq = tl.zeros([C, BK], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    dw = tl.zeros([BK, C], tl.float32)  # transposed: its products then take dA and dE as they are
    edge = tl.zeros([BK], tl.float32)
    if DELTA:
        dread = tl.zeros([C, BK], tl.float32)
        dE = tl.zeros([C, C], tl.float32)
        dbe = tl.zeros([C], tl.float32)
        be = tl.load(f + 3 * C + t)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        z = tile(do_, t, n, e, H * V, V)
        ux = tile(u_, t, n, e, H * V, V)
        S = tile(states + at_chunk, e, V, d, K, K)
        dS = tile(adjoints + at_chunk, e, V, d, K, K)
        dq = tl.dot(z, S, dq, input_precision=PREC)
        dw = tl.dot(tl.trans(dS), tl.trans(ux), dw, input_precision=PREC)
        dA = tl.dot(z, tl.trans(ux), dA, input_precision=PREC)
        if DECAY != 0:
            edge += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        if DELTA:
            r = tile(r_, t, n, e, H * V, V)
            dread = tl.dot(r, S, dread, input_precision=PREC)
            dE = tl.dot(r, tl.trans(ux), dE, input_precision=PREC)
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
    dA *= scale
    dq *= scale
    if DELTA:
        dF = -dE * be[:, None]
    if DECAY == 2:
        g_ = head(G, b, start, h, T, H, H, K)
        last = tl.minimum(t, n - 1)
        g = gates_at(g_, last, d, H * K, K)
        gt = gates_across(g_, last, d, H * K, K)
        gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
        own = tl.sum(tl.where(t[:, None] == t[None, :], dA, 0.0), 1)
        dw *= tl.exp2(gc[:, None] - gt)
        edge = edge * tl.exp2(gc) + tl.sum(tl.trans(yf) * dw, 1)
        dq = dq * tl.exp2(g) + own[:, None] * yf
        dw += own[None, :] * tl.trans(xf)
        low = reach(g, g_, t, n, d, H * K, K, LEVELS, LIMIT)
        mask = direct_mask(t, low)
        dev = g - gates_at(g_, middle(t, n, low), d, H * K, K)
        up = tl.exp2(dev)
        yw = (yf * tl.exp2(-dev)).to(dt)
        p = tl.where(mask, dA, 0.0).to(dt)
        dq += up * tl.dot(p, yw, input_precision=PREC)
        acc = tl.dot(tl.trans((xf * up).to(dt)), p, input_precision=PREC)
        if DELTA:
            dread = dread * tl.exp2(g) + up * tl.dot(tl.where(mask, dE, 0.0).to(dt), yw, input_precision=PREC)
            acc = tl.dot(tl.trans((yf * up).to(dt)), tl.where(mask, dF, 0.0).to(dt), acc, input_precision=PREC)
        dw += tl.exp2(gates_across(g_, middle(t, n, low), d, H * K, K) - gt) * acc
        for i in range(low, LEVELS):
            border = level_border(t, n, i)
            mask = level_mask(t, i)
            w = tl.exp2(-tl.abs(g - gates_at(g_, border, d, H * K, K)))
            yw = (yf * w).to(dt)
            p = tl.where(mask, dA, 0.0).to(dt)
            dq += w * tl.dot(p, yw, input_precision=PREC)
            acc = tl.dot(tl.trans((xf * w).to(dt)), p, input_precision=PREC)
            if DELTA:
                dread += w * tl.dot(tl.where(mask, dE, 0.0).to(dt), yw, input_precision=PREC)
                acc = tl.dot(tl.trans(yw), tl.where(mask, dF, 0.0).to(dt), acc, input_precision=PREC)
            dw += tl.exp2(-tl.abs(gt - gates_across(g_, border, d, H * K, K))) * acc
    else:
        if DECAY == 1:
            g = tl.load(f + t)
            down = tl.exp2(tl.where(lower, g[:, None] - g[None, :], float("-inf")))
            read = tl.load(f + C + t)
            dA *= down
            dq *= read[:, None]
            dw *= tl.load(f + 2 * C + t)[None, :]
            total = tl.sum(edge, 0) * tl.exp2(tl.load(f + C - 1)) + tl.sum(tl.sum(tl.trans(yf) * dw, 1), 0)
            if DELTA:
                dE *= down
                dF *= down
                dread *= read[:, None]
        else:
            dA = tl.where(lower, dA, 0.0)
        p = dA.to(dt)
        dq = tl.dot(p, y, dq, input_precision=PREC)
        dw = tl.dot(tl.trans(x), p, dw, input_precision=PREC)
        if DELTA:
            dread = tl.dot(tl.where(strict, dE, 0.0).to(dt), y, dread, input_precision=PREC)
            dw = tl.dot(tl.trans(y), tl.where(strict, dF, 0.0).to(dt), dw, input_precision=PREC)
    dw = tl.trans(dw)

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
