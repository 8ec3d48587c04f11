"""dk and dv of additive writes in one pass from right to left: both read the adjoint state, R = dSᵀ [V, K].

They are `additive`'s roles dv: (k, q, do) and dk: (v, do, q), with four loads for both instead of six. The state goes
through shared memory once a chunk, as the right operand of k R and, transposed, of v R. It must fit one program: head
sizes up to 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.additive import constant, rows, take
from ring_la.kernels.triton.tiles import SIZES, put, span


@triton.jit(do_not_specialize=SIZES)
def writes_kernel(
    Q, K_, V_, DO, F, entering, DK, DV, leaving, DOT, before, ends, EDGE, table, T, NS, NC, N, LENGTH, scale,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr, HAS_STATE: tl.constexpr, DOTS: tl.constexpr,
    BULK: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One segment; `leaving` takes the adjoint state before each piece. STATIC, DOTS, `before`, `ends`, EDGE and BULK
    as for `additive.attend_kernel`: DOT [B, H, T] = dk·k. Without a decay by token DK and DV are never descriptors,
    whose staging would not fit beside three chunks."""
    PUT: tl.constexpr = BULK and GATED and not STATIC
    s = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    t = tl.arange(0, C)
    q_, rq, cq = rows(Q, b, start, h, T, HK, H, K, BULK)
    k_, rk, ck = rows(K_, b, start, h, T, HK, H, K, BULK)
    v_, rv, cv = rows(V_, b, start, h, T, H, H, V, BULK)
    do_, _, _ = rows(DO, b, start, h, T, H, H, V, BULK)
    dk_, _, cdk = rows(DK, b, start, h, T, H, H, K, PUT)
    dv_, _, _ = rows(DV, b, start, h, T, H, H, V, PUT)
    f_ = F + ((b.to(tl.int64) * NC + chunk) * H + h) * (4 * C)
    row = (b.to(tl.int64) * NS + s) * H + h
    own = ((b.to(tl.int64) * N + piece) * H + h) * (K * V)
    inside = (e < V)[:, None] & (d < K)[None, :]
    at = d[None, :] * V + e[:, None]
    R = tl.zeros([BV, BK], tl.float32)
    if HAS_STATE:
        R = tl.load(entering + row * (K * V) + at, inside, other=0.0)
        if DOTS:
            after = tl.load(ends + own + at, inside & last, other=0.0)
            after += tl.load(before + (row + H) * (K * V) + at, inside & (last == 0), other=0.0)
            tl.store(EDGE + tl.program_id(1).to(tl.int64) * NS + s, tl.sum(tl.sum(R * after, 1), 0))
    n = (left + C - 1) // C
    sees = t[:, None] <= t[None, :]  # [j, i]
    one = tl.where(left > 0, 1.0, 0.0)  # a factor the compiler does not know, or it would chain the two products
    gc = 0.0
    reach = tl.zeros([C], tl.float32)
    if STATIC:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
        gap = (t[None, :] - t[:, None]).to(tl.float32) * rate
        decay = tl.exp2(tl.where(sees, gap, float("-inf")))
    elif GATED:
        f = f_ + (n - 1) * (H * 4 * C)
        gc = tl.load(f + C - 1)
        reach = tl.load(f + 2 * C + t)
    for m in range(n):
        i = n - 1 - m
        c = i * C
        k = take(K_, k_, rk, ck, c, t, left, d, 0, HK * K, K, BULK)
        q = take(Q, q_, rq, cq, c, t, left, d, 0, HK * K, K, BULK)
        v = take(V_, v_, rv, cv, c, t, left, e, 0, H * V, V, BULK)
        do = take(DO, do_, rv, cv, c, t, left, e, 0, H * V, V, BULK)
        P = tl.dot(k, tl.trans(q), input_precision=PREC)
        reach_next = reach
        gc_next = gc
        if STATIC:
            keep, reach, gc = constant(rate, scale, tl.minimum(left - c, C), t)
            P *= decay
        elif GATED:
            f = f_ + tl.maximum(i - 1, 0) * (H * 4 * C)
            gc_next = tl.load(f + C - 1)
            reach_next = tl.load(f + 2 * C + t)
            f = f_ + i * (H * 4 * C)
            keep = tl.load(f + C + t)
            g = tl.load(f + t)
            P *= tl.exp2(tl.where(sees, g[None, :] - g[:, None], float("-inf")))
        else:
            P = tl.where(sees, P, 0.0)
        state = R.to(k.dtype)
        dv = tl.dot(k, tl.trans(state), input_precision=PREC)
        dv *= reach[:, None] if GATED else one
        dv += tl.dot(P.to(k.dtype), do, input_precision=PREC) * scale
        if PUT:
            DV.store([rv + c, cv], dv.to(k.dtype))
        else:
            put(dv_ + c * (H * V), dv, t, left - c, e, H * V, V)
        A = tl.dot(v, tl.trans(do), input_precision=PREC)
        dow = tl.trans(do)
        if GATED:
            if STATIC:
                A *= decay
            else:
                A *= tl.exp2(tl.where(sees, g[None, :] - g[:, None], float("-inf")))
            dow = (dow.to(tl.float32) * keep[None, :]).to(k.dtype)
        else:
            A = tl.where(sees, A, 0.0)
            dow = (dow.to(tl.float32) * scale).to(k.dtype)
        dk = tl.dot(v, state, input_precision=PREC)
        if GATED:
            dk *= reach[:, None]
            R *= tl.exp2(gc)
        else:
            dk *= one
        dk += tl.dot(A.to(k.dtype), q, input_precision=PREC) * scale
        R = tl.dot(dow, q, R, input_precision=PREC)
        if DOTS:
            token = tl.program_id(1).to(tl.int64) * T + start + c + t
            tl.store(DOT + token, tl.sum(dk * k.to(tl.float32), 1), t < left - c)
        if PUT:
            DK.store([rk + c, cdk], dk.to(k.dtype))
        else:
            put(dk_ + c * (H * K), dk, t, left - c, d, H * K, K)
        gc = gc_next
        reach = reach_next
    if first:
        tl.store(leaving + own + at, R, inside)
