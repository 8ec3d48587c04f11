"""What a chunk computes before its state arrives: decayed products and the triangular inverse of the delta rule.

WY form (Yang et al. 2024, arXiv:2406.06484; with decay, arXiv:2412.06464): over a chunk, S_t = e^{G_t} S + Σ_{s≤t}
e^{G_t−G_s} k_s u_sᵀ with (I + L) U = β(V − e^G K S), L_ts = β_t e^{G_t−G_s} k_t·k_s for s < t. M = (I + L)⁻¹,
kept as M − I: what M multiplies is added to that product in fp32, and is rounded only where it meets other tokens.

A decay per key channel cannot leave the product Σ_d x_td y_sd e^{G_td−G_sd}, and e^{−G_s} may overflow. Pairs inside
blocks of 2^m tokens over which G varies little (`reach`) take the block's middle as reference. Every other pair (t,
s) is computed at the level of the smallest aligned block that holds both, t in its later half and s in its earlier
one: with the border's G as reference both factors are at most 1. Either way a level is one product of whole tiles;
with gates near 1 there is only one, and with gates so strong that m = 0 there are log2 C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.gates import chunk_factors, running
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile


@triton.jit
def level_mask(t, i):
    """[t, s]: t in the later and s in the earlier half of one aligned block of 2^{i+1} tokens."""
    same = (t[:, None] >> (i + 1)) == (t[None, :] >> (i + 1))
    return same & (((t[:, None] >> i) & 1) == 1) & (((t[None, :] >> i) & 1) == 0)


@triton.jit
def direct_mask(t, m):
    """[t, s]: s before t in one aligned block of 2^m tokens: the pairs no level from m on holds."""
    return ((t[:, None] >> m) == (t[None, :] >> m)) & (t[:, None] > t[None, :])


@triton.jit
def level_border(t, n, i):
    """The last token of the earlier half of t's block at level i."""
    return tl.minimum(((t >> (i + 1)) << (i + 1)) + (1 << i) - 1, n - 1)


@triton.jit
def middle(t, n, m):
    """The middle token of t's block of 2^m."""
    return tl.minimum(((t >> m) << m) + ((1 << m) >> 1), n - 1)


@triton.jit
def gates_at(g_, rows, d, STRIDE: tl.constexpr, D: tl.constexpr):
    """G of the given tokens."""
    return tl.load(g_ + rows[:, None] * STRIDE + d[None, :], (d < D)[None, :], other=0.0)


@triton.jit
def reach(G, g_, t, n, d, STRIDE: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr):
    """The largest m for which no token of an aligned block of 2^m is LIMIT or more from its middle, in powers of two.

    Inside such blocks one reference serves all pairs: the factors 2^{±LIMIT} stay far inside the exponents' range.
    """
    m = LEVELS
    spread = tl.max(tl.max(tl.abs(G - gates_at(g_, middle(t, n, m), d, STRIDE, D)), 1), 0)
    while spread > LIMIT:
        m -= 1
        spread = tl.max(tl.max(tl.abs(G - gates_at(g_, middle(t, n, m), d, STRIDE, D)), 1), 0)
    return m


@triton.jit
def level_weights(g, g_, t, n, d, low, i, STRIDE: tl.constexpr, D: tl.constexpr):
    """(e^{G − ref}, e^{ref − G}, mask) of the pairs of level i; below `low`, of those that share a block's middle."""
    if i < low:
        up = g - gates_at(g_, middle(t, n, low), d, STRIDE, D)
        down = tl.exp2(-up)
        up = tl.exp2(up)
        mask = direct_mask(t, low)
    else:
        up = tl.exp2(-tl.abs(g - gates_at(g_, level_border(t, n, i), d, STRIDE, D)))
        down = up
        mask = level_mask(t, i)
    return up, down, mask


@triton.jit
def invert(L, C: tl.constexpr, PREC: tl.constexpr):
    """(I + L)⁻¹ − I for a strictly lower triangular L [C, C]: blocks of 16 by substitution, then pairs of blocks by
    products.

    For [[P, 0], [X, Q]] the inverse's corner is −Q⁻¹ X P⁻¹; no power of L is ever formed.
    """
    NB: tl.constexpr = C // 16
    t = tl.arange(0, C)
    i = tl.arange(0, 16)
    block = tl.arange(0, NB)
    same = block[:, None, None, None] == block[None, None, :, None]
    L3 = tl.sum(tl.where(same, tl.reshape(L, [NB, 16, NB, 16]), 0.0), 2)
    P3 = tl.zeros([NB, 16, 16], tl.float32) + (i[:, None] == i[None, :]).to(tl.float32)[None, :, :]
    for s in range(15):
        column = tl.sum(tl.where((i == s)[None, None, :], L3, 0.0), 2)
        row = tl.sum(tl.where((i == s)[None, :, None], P3, 0.0), 1)
        P3 -= column[:, :, None] * row[:, None, :]
    P = tl.reshape(tl.where(same, P3[:, :, None, :], 0.0), [C, C])
    if C >= 32:
        X = tl.where(level_mask(t, 4), L, 0.0)
        P -= tl.dot(tl.dot(P, X, input_precision=PREC), P, input_precision=PREC)
    if C >= 64:
        X = tl.where(level_mask(t, 5), L, 0.0)
        P -= tl.dot(tl.dot(P, X, input_precision=PREC), P, input_precision=PREC)
    return P - (t[:, None] == t[None, :]).to(tl.float32)


@triton.jit
def put_bound(at, G, x, t, C: tl.constexpr):
    """Store log2 of what the norm of a chunk's transition Π e^{g_t} (I − β_t k_t k_tᵀ) is at most; the diagonal of
    x is β |k|². Of a token that lets the state grow, |1 − β |k|²| − 1 is counted, no less than its logarithm."""
    growth = tl.where(t[:, None] == t[None, :], tl.maximum(tl.abs(1 - x) - 1, 0.0), 0.0)
    tl.store(at + t * 0, G + tl.sum(growth) * 1.4426950408889634, t == C - 1)


@triton.jit(do_not_specialize=SIZES)
def plain_products_kernel(
    q, k, g, beta, F, bounds, A, M, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr, BOUNDED: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """A_ts = scale · e^{G_t−G_s} q_t·k_s (s ≤ t) and M − I [B, T, H, C] of every chunk, for a scalar decay or none; F:
    its `chunk_factors`; BOUNDED: also `put_bound`'s, [B, H, NC]."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    f = F + entry(b, s, h, NC, H) * (4 * C)
    G, be = chunk_factors(g, beta, f, b.to(tl.int64) * T + start, t, n, h, H, C, GATED, STATIC)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        y = tile(k_, t, n, d, HK * K, K)
        a = tl.dot(tile(q_, t, n, d, HK * K, K), tl.trans(y), a, input_precision=PREC)
        L = tl.dot(y, tl.trans(y), L, input_precision=PREC)
    if GATED:
        decay = tl.exp2(tl.where(t[:, None] >= t[None, :], G[:, None] - G[None, :], float("-inf")))
        a *= decay
        L *= decay
    a = tl.where(t[:, None] >= t[None, :], a * scale, 0.0)
    put(head(A, b, start, h, T, H, H, C), a, t, n, t, H * C, C)
    L *= be[:, None]
    if BOUNDED:
        put_bound(bounds + (b.to(tl.int64) * H + h) * NC + s, G, L, t, C)
    L = tl.where(t[:, None] > t[None, :], L, 0.0)
    put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


@triton.jit
def nearest(x, PREC: tl.constexpr):
    """x as a product in tf32 takes it, but rounded: the product itself drops the last 13 bits, and all it gives is then
    too small. A NaN stays one."""
    if PREC == "tf32":
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FC00000) + 0x1000
        x = (bits & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def put_square(A, Ar, a, b, h, start, t, n, T, H: tl.constexpr, C: tl.constexpr, FINE: tl.constexpr):
    """Store a chunk's [C, C]; FINE: what its rounding leaves too."""
    put(head(A, b, start, h, T, H, H, C), a, t, n, t, H * C, C)
    if FINE:
        put(head(Ar, b, start, h, T, H, H, C), a - a.to(A.dtype.element_ty).to(tl.float32), t, n, t, H * C, C)


@triton.jit
def row_of(x, t, i):
    """Row i of x, by token t."""
    return tl.sum(tl.where((t == i)[:, None], x, 0.0), 0)


@triton.jit(do_not_specialize=SIZES)
def products_kernel(
    q, k, g_, beta, F, G, A, Ar, M, qr_, kr_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, DELTA: tl.constexpr,
    FINE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """A_ts = scale · Σ_d q_td k_sd e^{G_td−G_sd} (s ≤ t) and, for the delta rule, M − I; a decay per key channel.

    Also G (in units of ln 2) and what the passes read and write: qr = e^G q, kr = e^G k (delta), kw = e^{G_C−G} k, all
    [B, T, H, K], and β's row of F. One reference serves the whole chunk: low [B, NC, H] says LEVELS where it may, else
    −1, and what is computed here is then replaced by `levels_kernel`.
    """
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    at = entry(b, start, h, T, H) * K
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    spread = 0.0
    half = tl.minimum(C // 2, n - 1)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        g = running(tile(g_ + at, t, n, d, H * K, K), C, PREC)  # past the chunk's end the sum stays what it was
        put(G + at, g, t, n, d, H * K, K)
        x = tile(q_, t, n, d, HK * K, K)
        y = tile(k_, t, n, d, HK * K, K)
        own += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
        ref = row_of(g, t, half)
        rest = row_of(g, t, C - 1) - ref
        g -= ref[None, :]
        spread = tl.maximum(spread, tl.max(tl.max(tl.abs(g), 1), 0))
        ref = tl.exp2(ref)[None, :]
        up = tl.exp2(g)
        yw = y * tl.exp2(-g)
        put(kw_ + at, yw * tl.exp2(rest)[None, :], t, n, d, H * K, K)
        yw = tl.trans(nearest(yw, PREC))
        xw = x * up
        put(qr_ + at, xw * ref, t, n, d, H * K, K)
        a = tl.dot(nearest(xw, PREC), yw, a, input_precision=PREC)
        if DELTA:
            xw = y * up
            put(kr_ + at, xw * ref, t, n, d, H * K, K)
            L = tl.dot(nearest(xw, PREC), yw, L, input_precision=PREC)
    tl.store(low_ + entry(b, s, h, NC, H), tl.where(spread <= LIMIT, LEVELS, -1))
    a = tl.where(t[:, None] > t[None, :], a, 0.0) + tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
    put_square(A, Ar, a * scale, b, h, start, t, n, T, H, C, FINE)
    if DELTA:
        f = F + entry(b, s, h, NC, H) * (4 * C)
        _, be = chunk_factors(g_, beta, f, b.to(tl.int64) * T + start, t, n, h, H, C, False, False)
        L = tl.where(t[:, None] > t[None, :], L * be[:, None], 0.0)
        put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


@triton.jit(do_not_specialize=SIZES)
def levels_kernel(
    q, k, F, G, A, Ar, M, qr_, kr_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What `products_kernel` computes, level by level, for the chunks it left (low < 0); low ← their `reach`."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low_ += entry(b, s, h, NC, H)
    if tl.load(low_) >= 0:
        return
    t = tl.arange(0, C)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    at = entry(b, start, h, T, H) * K
    G_ = G + at
    dt = k.dtype.element_ty
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    least = LEVELS
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        x = tile(q_, t, n, d, HK * K, K)
        y = tile(k_, t, n, d, HK * K, K)
        g = gates_at(G_, tl.minimum(t, n - 1), d, H * K, K)
        gc = tl.load(G_ + (n - 1) * (H * K) + d, d < K, other=0.0)
        own = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
        a += tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
        put(kw_ + at, y * tl.exp2(gc[None, :] - g), t, n, d, H * K, K)
        up = tl.exp2(g)
        put(qr_ + at, x * up, t, n, d, H * K, K)
        if DELTA:
            put(kr_ + at, y * up, t, n, d, H * K, K)
        low = reach(g, G_, t, n, d, H * K, K, LEVELS, LIMIT)
        least = tl.minimum(least, low)
        for i in range(low - 1, LEVELS):
            up, down, mask = level_weights(g, G_, t, n, d, low, i, H * K, K)
            yw = tl.trans((y * down).to(dt))
            a += tl.where(mask, tl.dot((x * up).to(dt), yw, input_precision=PREC), 0.0)
            if DELTA:
                L += tl.where(mask, tl.dot((y * up).to(dt), yw, input_precision=PREC), 0.0)
    tl.store(low_, least)
    put_square(A, Ar, a * scale, b, h, start, t, n, T, H, C, FINE)
    if DELTA:
        be = tl.load(F + entry(b, s, h, NC, H) * (4 * C) + 3 * C + t)
        L = tl.where(t[:, None] > t[None, :], L * be[:, None], 0.0)
        put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


@triton.jit(do_not_specialize=SIZES)
def weigh_kernel(
    q, kr, kw, kv, G, qr_, kr_, kw_, kv_, table, T, H: tl.constexpr, HK: tl.constexpr, HR: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, DPLR: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What the passes read and write, again from G: e^G q, e^G kr (dplr: with the G before), e^{G_C−G} kw and kv.

    q (and kv) have HK heads, kr and kw HR.
    """
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    g_ = head(G, b, start, h, T, H, H, K)
    g = tile(g_, t, n, d, H * K, K)
    gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
    eg = tl.exp2(g)
    put(
        head(qr_, b, start, h, T, H, H, K),
        tile(head(q, b, start, h, T, HK, H, K), t, n, d, HK * K, K) * eg,
        t,
        n,
        d,
        H * K,
        K,
    )
    y = tile(head(kw, b, start, h, T, HR, H, K), t, n, d, HR * K, K)
    eg_c = tl.exp2(gc[None, :] - g)
    put(head(kw_, b, start, h, T, H, H, K), y * eg_c, t, n, d, H * K, K)
    if DELTA:
        put(head(kr_, b, start, h, T, H, H, K), y * eg, t, n, d, H * K, K)
    if DPLR:
        before = tl.load(
            g_ + (t[:, None] - 1) * (H * K) + d[None, :], ((t > 0) & (t < n))[:, None] & (d < K)[None, :], other=0.0
        )
        x = tile(head(kr, b, start, h, T, HR, H, K), t, n, d, HR * K, K)
        put(head(kr_, b, start, h, T, H, H, K), x * tl.exp2(before), t, n, d, H * K, K)
        y = tile(head(kv, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        put(head(kv_, b, start, h, T, H, H, K), y * eg_c, t, n, d, H * K, K)
