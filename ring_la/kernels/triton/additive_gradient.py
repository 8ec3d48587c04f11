"""The gradients of additive writes under a scalar decay but for v's, all chunks at once.

With S the state before a chunk, R the gradient of the one after it, and the factors of `additive`:

    dq_i = c e^{G_i} S do_i + c Σ_{j≤i} e^{G_i−G_j} (do_i·v_j) k_j            b_i: q_i · the first term
    dk_j = e^{G_C−G_j} R v_j + c Σ_{i≥j} e^{G_i−G_j} (v_j·do_i) q_i            w_j: k_j · the first term
    dg_t = e^{G_C} <S, R> + Σ_{i≥t} b_i + Σ_{j<t} w_j + Σ_{j<t≤i} x_ij,       x_ij = c e^{G_i−G_j} (q_i·k_j) (do_i·v_j)

dg_t is what the pairs of tokens give that t separates, each counted once: around the chunk, from before it, to after
it, inside it. Nothing in it cancels but Σ_{s≥t} (Σ_j x_sj − Σ_i x_is), whose terms are the same fp32 numbers, and no
error goes further than a chunk. (The difference of q·dq and k·dk, summed over tokens, is the same in exact arithmetic.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.additive import constant
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit(do_not_specialize=SIZES)
def additive_gradient_kernel(
    q, k, v, do, F, states, adjoints, dq_, dk_, dg_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STATIC: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One chunk, BK key channels. `states` and `adjoints` [B, NC, H, K, V] are S and R of every chunk; dg [NK, B, T, H]
    has a part for each block of channels. F and STATIC as for `additive.attend_kernel`."""
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
    e = tl.arange(0, BV)
    chunk = (b.to(tl.int64) * NC + s) * H + h
    if STATIC:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
        keep, reach, gc = constant(rate, scale, n, t)
        g = rate * t  # only differences of it are used
    else:
        f = F + chunk * (4 * C)
        g = tl.load(f + t)
        keep = tl.load(f + C + t)
        reach = tl.load(f + 2 * C + t)
        gc = tl.load(f + C - 1)
    x = tile(head(q, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    y = tile(head(k, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    z = tile(head(v, b, start, h, T, H, H, V), t, n, e, H * V, V)
    w = tile(head(do, b, start, h, T, H, H, V), t, n, e, H * V, V)
    S = tile(states + chunk * (K * V), d, K, e, V, V)
    R = tile(adjoints + chunk * (K * V), d, K, e, V, V)
    through = tl.sum(tl.sum(S.to(tl.float32) * R.to(tl.float32), 1), 0) * tl.exp2(gc)
    P = tl.dot(y, tl.trans(x), input_precision=PREC)
    A = tl.dot(z, tl.trans(w), input_precision=PREC)  # both [j, i]
    P *= tl.exp2(tl.where(t[:, None] <= t[None, :], g[None, :] - g[:, None], float("-inf")))
    pairs = tl.where(t[:, None] < t[None, :], P * A, 0.0) * scale
    reads = tl.sum(pairs, 0) - tl.sum(pairs, 1)
    A *= tl.exp2(tl.where(t[:, None] <= t[None, :], g[None, :] - g[:, None], float("-inf")))
    dk = tl.dot(z, tl.trans(R), input_precision=PREC) * reach[:, None]
    writes = tl.sum(dk * y.to(tl.float32), 1)
    dk += tl.dot(A.to(y.dtype), x, input_precision=PREC) * scale
    put(head(dk_, b, start, h, T, H, H, K), dk, t, n, d, H * K, K)
    A = tl.dot(w, tl.trans(z), input_precision=PREC)  # [i, j]
    A *= tl.exp2(tl.where(t[:, None] >= t[None, :], g[:, None] - g[None, :], float("-inf")))
    dq = tl.dot(w, tl.trans(S), input_precision=PREC) * keep[:, None]
    reads += tl.sum(dq * x.to(tl.float32), 1)
    dq += tl.dot(A.to(y.dtype), y, input_precision=PREC) * scale
    put(head(dq_, b, start, h, T, H, H, K), dq, t, n, d, H * K, K)
    dg = tl.cumsum(reads, 0, reverse=True) + tl.cumsum(writes, 0) - writes + through
    part = (ik * (tl.num_programs(1) // H) + b).to(tl.int64) * T + start + t
    tl.store(dg_ + part * H + h, dg, t < n)
