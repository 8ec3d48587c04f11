"""A chunk's gradients from what the two passes left: the state before it, S, and the gradient of the one after, dS.

With dA = dO Uᵀ and dE = dR Uᵀ (t ≥ s and t > s), decays e^{G_t−G_s} inside the sums, and k's two roles apart (it is
read against the state, and written to it):

    dq_t      = scale · (e^{G_t} S dO_t + Σ_s dA_ts k_s)
    dk_t read =        e^{G_t} S dR_t + Σ_s dE_ts k_s                       (enters dk with −β_t)
    dk_s write = e^{G_C−G_s} dS U_s + Σ_t scale · dA_ts q_t − Σ_t β_t dE_ts k_t
    dβ_t = dR_t·v_t − k_t·(dk_t read),   dv_t = β_t dR_t
    dG_t = q_t·dq_t − β_t k_t·(dk_t read) − k_t·(dk_t write);   dg_t = <S', dS> + Σ_{s≥t} dG_s

S' the state after the chunk. What the pass leaves is dv = β dR, rounded once: E and the read part of dk come of it with
their β, and dβ is divided by it (`divisor`). Here a decay per key channel, where the same holds channel by channel and
the decayed sums go by `intra`'s levels: `pairs` finds P = scale · dA and E = dE, which sum over V, `gradient` the rest
for a block of key channels. `delta_gradient` does it for a scalar decay or none. (The identities are the adjoint of the
WY form; cf. arXiv:2412.06464, arXiv:2510.26692.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.gates import divisor, share
from ring_la.kernels.triton.intra import gates_at, level_weights
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile


@triton.jit(do_not_specialize=SIZES)
def pairs_kernel(
    v, F, do, u, dv, P, E, own, dbeta, table, T, NC, scale, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DELTA: tl.constexpr, READS: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """P and E of one chunk for a decay per key channel, [B, T, H, C], strictly lower; P's diagonal, which no decay
    touches, [B, T, H]. READS: there is a dR. For delta writes, where E is β E, also the part dR·v of dβ."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    at = entry(b, start, h, T, H) * V
    p = tl.zeros([C, C], tl.float32)
    x = tl.zeros([C, C], tl.float32)
    dbe = tl.zeros([C], tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        ux = tl.trans(tile(u + at, t, n, e, H * V, V))
        p = tl.dot(tile(do + at, t, n, e, H * V, V), ux, p, input_precision=PREC)
        if READS:
            r = tile(dv + at, t, n, e, H * V, V)
            x = tl.dot(r, ux, x, input_precision=PREC)
        if DELTA:
            dbe += tl.sum(r.to(tl.float32) * tile(v + at, t, n, e, H * V, V).to(tl.float32), 1)
    p *= scale
    strict = t[:, None] > t[None, :]
    put(head(P, b, start, h, T, H, H, C), tl.where(strict, p, 0.0), t, n, t, H * C, C)
    p = tl.sum(tl.where(t[:, None] == t[None, :], p, 0.0), 1)
    tl.store(head(own, b, start, h, T, H, H, 1) + t * H, p, t < n)
    if READS:
        put(head(E, b, start, h, T, H, H, C), tl.where(strict, x, 0.0), t, n, t, H * C, C)
    if DELTA:
        be = divisor(tl.load(F + entry(b, s, h, NC, H) * (4 * C) + 3 * C + t), u.dtype.element_ty)
        tl.store(head(dbeta, b, start, h, T, H, H, 1) + t * H, dbe / be, t < n)


@triton.jit
def twofold(a, b, acc, PREC: tl.constexpr):
    """acc + a b for an fp32 b, which goes in two parts of a's dtype; one, if that is fp32."""
    part = b.to(a.dtype)
    if a.dtype != tl.float32:
        acc = tl.dot(a, (b - part.to(tl.float32)).to(a.dtype), acc, input_precision=PREC)
    return tl.dot(a, part, acc, input_precision=PREC)


@triton.jit
def at_once(dq, dw, dread, x, y, of, p, r, g, gc, ref, DELTA: tl.constexpr, PREC: tl.constexpr):
    """A chunk under one reference: (dq, dw, dread, dG, Σ k·dw of what leaves it), given what the states contribute."""
    down = tl.exp2(ref[None, :] - g)
    yw = y * down
    dw *= tl.exp2(gc - ref)[None, :]
    inside = tl.sum(yw * dw, 0)
    w = tl.exp2(ref)[None, :]
    dq = twofold(p, yw, dq * w, PREC)
    if DELTA:
        dread = twofold(r, yw, dread * w, PREC)
    w = tl.exp2(g - ref[None, :])
    xw = x * w
    dw = twofold(tl.trans(p), xw, dw, PREC)
    dG = xw * dq
    dq *= w
    if DELTA:
        xw = -(y * w) * of
        dw = twofold(tl.trans(r), xw, dw, PREC)
        dG += xw * dread
        dread *= w
    dG -= yw * dw
    return dq, dw * down, dread, dG, inside


@triton.jit
def at_level(dq, dw, dread, dG, x, y, of, p, r, w, down, DELTA: tl.constexpr, PREC: tl.constexpr):
    """(dq, dw, dread, dG) with the pairs of one level.

    Pairs cancel in dG: what they are summed with must be rounded like what they were multiplied with.
    """
    xw = (x * w).to(x.dtype)
    yw = (y * down).to(y.dtype)
    acc = tl.dot(p, yw, input_precision=PREC)
    dq += w * acc
    dG += xw.to(tl.float32) * acc
    acc = tl.dot(tl.trans(p), xw, input_precision=PREC)
    if DELTA:
        xw = (-(y * w) * of).to(y.dtype)
        read = tl.dot(r, yw, input_precision=PREC)
        dread += w * read
        dG += xw.to(tl.float32) * read
        acc = tl.dot(tl.trans(r), xw, acc, input_precision=PREC)
    return dq, dw + down * acc, dread, dG - yw.to(tl.float32) * acc


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    q, k, F, G, low_, own_, do, u, dv, P, E, states, adjoints, dq_, dk_, dg_, dbeta_, table, T, NC, scale,
    H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, LEVELLED: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One chunk, BK key channels, a decay each. dq, dk per value head; dβ per block of channels, [NK, B, T, H].

    `states` and `adjoints` hold S and dS of every chunk, [V, K]. LEVELLED takes the chunks that need levels, otherwise
    those that do not (`intra`). Pairs of a token with itself go by `own`; dg leaves them out, where they cancel.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    ik = tl.program_id(0) % NK
    s = tl.program_id(0) // NK
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low = tl.load(low_ + entry(b, s, h, NC, H))
    if LEVELLED == (low == LEVELS):
        return
    t = tl.arange(0, C)
    d = ik * BK + tl.arange(0, BK)
    do_ = head(do, b, start, h, T, H, H, V)
    u_ = head(u, b, start, h, T, H, H, V)
    r_ = head(dv, b, start, h, T, H, H, V)
    at_chunk = entry(b, s, h, NC, H) * (K * V)
    dq = tl.zeros([C, BK], tl.float32)
    dw = tl.zeros([C, BK], tl.float32)
    dread = tl.zeros([C, BK], tl.float32)
    edges = tl.zeros([BV, BK], tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        S = tile(states + at_chunk, e, V, d, K, K)
        dS = tile(adjoints + at_chunk, e, V, d, K, K)
        dq = tl.dot(tile(do_, t, n, e, H * V, V), S, dq, input_precision=PREC)
        dw = tl.dot(tile(u_, t, n, e, H * V, V), dS, dw, input_precision=PREC)
        if DELTA:
            dread = tl.dot(tile(r_, t, n, e, H * V, V), S, dread, input_precision=PREC)
        edges += S.to(tl.float32) * dS.to(tl.float32)
    dq *= scale
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    p_ = head(P, b, start, h, T, H, H, C)
    e_ = head(E, b, start, h, T, H, H, C)
    x = tile(q_, t, n, d, HK * K, K)
    y = tile(k_, t, n, d, HK * K, K)
    of = share(tl.load(F + entry(b, s, h, NC, H) * (4 * C) + 3 * C + t)[:, None], x.dtype) if DELTA else 1.0
    g_ = head(G, b, start, h, T, H, H, K)
    g = gates_at(g_, tl.minimum(t, n - 1), d, H * K, K)
    gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
    edge = tl.sum(edges, 0) * tl.exp2(gc)
    if not LEVELLED:
        ref = tl.load(g_ + tl.minimum(C // 2, n - 1) * (H * K) + d, d < K, other=0.0)
        strict = t[:, None] > t[None, :]
        # through registers: products of transposed tiles that lie in shared memory as they were loaded go wrong
        p = tl.where(strict, tile(p_, t, n, t, H * C, C), 0.0).to(x.dtype)
        r = tl.where(strict, tile(e_, t, n, t, H * C, C), 0.0).to(x.dtype) if DELTA else p
        dq, dw, dread, dG, inside = at_once(dq, dw, dread, x, y, of, p, r, g, gc, ref, DELTA, PREC)
    else:
        w = tl.exp2(g)
        dq *= w
        dread *= w
        dw *= tl.exp2(gc[None, :] - g)
        dG = x.to(tl.float32) * dq - y.to(tl.float32) * (dw + dread * of)
        inside = tl.sum(y.to(tl.float32) * dw, 0)
        for i in range(low - 1, LEVELS):
            x = tile(q_, t, n, d, HK * K, K)
            y = tile(k_, t, n, d, HK * K, K)
            g = gates_at(g_, tl.minimum(t, n - 1), d, H * K, K)
            w, down, mask = level_weights(g, g_, t, n, d, low, i, H * K, K)
            p = tl.where(mask, tile(p_, t, n, t, H * C, C), 0.0).to(x.dtype)
            r = tl.where(mask, tile(e_, t, n, t, H * C, C), 0.0).to(x.dtype) if DELTA else p
            dq, dw, dread, dG = at_level(dq, dw, dread, dG, x, y, of, p, r, w, down, DELTA, PREC)
        x = tile(q_, t, n, d, HK * K, K)
        y = tile(k_, t, n, d, HK * K, K)
    edge += inside
    yf = y.to(tl.float32)
    if DELTA:
        part = ((ik * (tl.num_programs(1) // H) + b).to(tl.int64) * T + start + t) * H + h
        be = divisor(tl.load(F + entry(b, s, h, NC, H) * (4 * C) + 3 * C + t), y.dtype)
        tl.store(dbeta_ + part, -tl.sum(yf * dread, 1) / be, t < n)
        dread *= of
    own = tl.load(head(own_, b, start, h, T, H, H, 1) + t * H, t < n, other=0.0)[:, None]
    xf = x.to(tl.float32)
    put(head(dq_, b, start, h, T, H, H, K), dq + own * yf, t, n, d, H * K, K)
    put(head(dk_, b, start, h, T, H, H, K), dw - dread + own * xf, t, n, d, H * K, K)
    dg = tl.cumsum(dG, 0, reverse=True) + edge[None, :]  # in fp32: most of it may cancel
    put(head(dg_, b, start, h, T, H, H, K), dg, t, n, d, H * K, K)
