"""Device code of softmax attention with every mask and bias, at global positions.

Rows and keys carry (document, position, index); which tiles meet is a list made beforehand (see `plan`), whole tiles
first, so that only tiles on a border form their mask. Scores are kept in base 2. Running sums (`softmax.sums`) are
channels behind a head's: SUMS more of a product. Their gradients, ``Σ ds``, stay apart, in fp32. The backward pass has
a kernel for the keys and one for the queries: no atomics, so it is repeatable; scores of the keys' kernel are formed
transposed, since ``tl.dot(tl.trans(x), y)`` with x from accumulators is miscompiled on Hopper by Triton 3.4 to 3.7.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
CHANGING = ("Tq", "Tk", "H", "groups", "tiles", "slope_rows", "left", "right", "threshold", "seed_lo", "seed_hi")
"""Arguments that change from call to call: no kernel is compiled anew for them."""


@triton.jit
def mix(x):
    """The 32-bit finaliser of MurmurHash3; see `scores.mix`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def dropout_key(batch, head, seed_lo, seed_hi):
    """The key of one batch row and head."""
    row = (batch * 65536 + head).to(tl.uint32)
    return mix(mix(row ^ seed_lo.to(tl.uint32)) ^ seed_hi.to(tl.uint32))


@triton.jit
def kept(key, q_index, k_index, threshold):
    """The pairs dropout keeps; `q_index` and `k_index` broadcast against each other."""
    rows = mix(key ^ q_index.to(tl.uint32))
    return mix(rows ^ (k_index.to(tl.uint32) * 0x9E3779B1)) >= threshold.to(tl.uint32)


@triton.jit
def capped(s, cap, CAP: tl.constexpr):
    """(s, ds/ds) after the softcap."""
    if CAP:
        bent = 2 * tl.sigmoid(2 * s / cap) - 1
        return cap * bent, 1 - bent * bent
    else:
        return s, s


@triton.jit
def probabilities(s, lse, bias, scale, cap, CAP: tl.constexpr, ALIBI: tl.constexpr):
    """(p, ds/ds after the softcap) of products q·k; `bias`: ALiBi's."""
    if CAP or ALIBI:
        s, bent = capped(s * scale, cap, CAP)
        if ALIBI:
            s -= bias
        return tl.exp2((s - lse) * LOG2E), bent
    else:
        return tl.exp2(tl.fma(s, scale * LOG2E, -lse * LOG2E)), s


@triton.jit
def seen(qd, kd, distance, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Pairs a query sees; a key of document −1 is of every document."""
    mask = (qd == kd) | (kd == -1)
    if LEFT:
        mask = mask & (distance >= -left)
    if RIGHT:
        mask = mask & (distance <= right)
    return mask


@triton.jit
def load_rows(X, rows, columns, count, width, stride, FULL: tl.constexpr, INSIDE: tl.constexpr = False):
    """``X[rows, columns]``, zero outside; FULL: no column is outside, INSIDE: no row is."""
    at = X + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if FULL and INSIDE:
        return tl.load(at)
    if INSIDE:
        return tl.load(at, mask=(columns < width)[None, :], other=0.0)
    if FULL:
        return tl.load(at, mask=(rows < count)[:, None], other=0.0)
    return tl.load(at, mask=(rows < count)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=CHANGING)
def forward(
    Q, K, V, O, L, LIST, COUNTS, QP, QD, QI, KP, KD, KI, SLOPES, HEADS,
    scale, cap, left, right, keep_scale, threshold, seed_lo, seed_hi,
    Tq, Tk, H, groups, tiles, slope_rows,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    KW, VW, DW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr, SUMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and lse of BM rows of one head."""
    tile, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    g = h // (H // groups)
    rows, ck, cv = tile * BM + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    q = load_rows(Q + b.to(tl.int64) * q_b + h * q_h, rows, ck, Tq, KW, q_t, FULL_K)
    qp = tl.load(QP + rows, mask=rows < Tq, other=0)[:, None]
    qd = tl.load(QD + rows, mask=rows < Tq, other=-4)[:, None]
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + (b % slope_rows) * H + h)
    if DROP:
        qi = tl.load(QI + rows, mask=rows < Tq, other=0)[:, None]
        key = dropout_key(b, tl.load(HEADS + h), seed_lo, seed_hi)
    if SUMS:
        cs = tl.arange(0, SUMS)
        q_sums = load_rows(Q + b.to(tl.int64) * q_b + h * q_h + KW, rows, cs, Tq, DW - KW, q_t, False)
    acc = tl.zeros((BM, BV), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    whole, count = tl.load(COUNTS + 2 * tile), tl.load(COUNTS + 2 * tile + 1)
    K += b.to(tl.int64) * k_b + g * k_h
    V += b.to(tl.int64) * v_b + g * v_h
    for border in tl.static_range(2):  # tiles that are seen whole, then those that need their mask
        for n in range(border * whole, whole + border * (count - whole)):
            keys = tl.load(LIST + tile.to(tl.int64) * tiles + n) * BN + tl.arange(0, BN)
            k = load_rows(K, keys, ck, Tk, KW, k_t, FULL_K, border == 0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SUMS:
                k_sums = load_rows(K + KW, keys, cs, Tk, DW - KW, k_t, False, border == 0)
                s = tl.dot(q_sums, tl.trans(k_sums), s, input_precision=PRECISION)
            if ALIBI or border == 1:
                kp = tl.load(KP + keys, mask=keys < Tk, other=0)[None, :]
            if CAP or ALIBI:
                s, _ = capped(s * scale, cap, CAP)
                if ALIBI:
                    s -= slope * tl.abs(kp - qp).to(tl.float32)
                s *= LOG2E
            else:
                s *= scale * LOG2E
            if border == 1:
                kd = tl.load(KD + keys, mask=keys < Tk, other=-3)[None, :]
                s = tl.where(seen(qd, kd, kp - qp, left, right, LEFT, RIGHT), s, -float("inf"))
            new = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(new == -float("inf"), 0.0, new)
            p = tl.exp2(s - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(p, 1)
            if DROP:
                ki = tl.load(KI + keys, mask=keys < Tk, other=0)[None, :]
                p = tl.where(kept(key, qi, ki, threshold), p * keep_scale, 0.0)
            v = load_rows(V, keys, cv, Tk, VW, v_t, FULL_V, border == 0)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = new
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, -float("inf"))
    at = L + bh.to(tl.int64) * Tq + rows
    o_at = O + b.to(tl.int64) * o_b + h * o_h + rows[:, None].to(tl.int64) * o_t + cv[None, :]
    o_mask = (rows < Tq)[:, None] & (cv < VW)[None, :]
    tl.store(at, lse, mask=rows < Tq)
    tl.store(o_at, acc.to(O.dtype.element_ty), mask=o_mask)


@triton.jit(do_not_specialize=CHANGING)
def backward_keys(
    Q, K, V, DO, L, DELTA, DK, DV, DC, LIST, COUNTS, QP, QD, QI, KP, KD, KI, SLOPES, HEADS,
    scale, cap, left, right, keep_scale, threshold, seed_lo, seed_hi,
    Tq, Tk, H, groups, tiles, slope_rows,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    KW, VW, DW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr, SUMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (contiguous ``[B, Tk, groups, ·]``) of BN keys, over all query heads that read them."""
    tile, bg = tl.program_id(0), tl.program_id(1)
    b, g = bg // groups, bg % groups
    keys, columns, cv = tile * BN + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    k = load_rows(K + b.to(tl.int64) * k_b + g * k_h, keys, columns, Tk, KW, k_t, FULL_K)
    v = load_rows(V + b.to(tl.int64) * v_b + g * v_h, keys, cv, Tk, VW, v_t, FULL_V)
    kp = tl.load(KP + keys, mask=keys < Tk, other=0)[:, None]
    kd = tl.load(KD + keys, mask=keys < Tk, other=-3)[:, None]
    ki = tl.load(KI + keys, mask=keys < Tk, other=0)[:, None]
    if SUMS:
        cs = tl.arange(0, SUMS)
        k_sums = load_rows(K + b.to(tl.int64) * k_b + g * k_h + KW, keys, cs, Tk, DW - KW, k_t, False)
        dc = tl.zeros((BN,), tl.float32)
    dk, dv = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BV), tl.float32)
    whole, count = tl.load(COUNTS + 2 * tile), tl.load(COUNTS + 2 * tile + 1)
    for h in range(g * (H // groups), (g + 1) * (H // groups)):
        of_head = b * H + h
        if ALIBI:
            slope = tl.load(SLOPES + (b % slope_rows) * H + h)
        if DROP:
            key = dropout_key(b, tl.load(HEADS + h), seed_lo, seed_hi)
        for border in tl.static_range(2):
            for n in range(border * whole, whole + border * (count - whole)):
                rows = tl.load(LIST + tile.to(tl.int64) * tiles + n) * BM + tl.arange(0, BM)
                q = load_rows(Q + b.to(tl.int64) * q_b + h * q_h, rows, columns, Tq, KW, q_t, FULL_K)
                do = load_rows(DO + b.to(tl.int64) * o_b + h * o_h, rows, cv, Tq, VW, o_t, FULL_V)
                at = of_head.to(tl.int64) * Tq + rows
                lse = tl.load(L + at, mask=rows < Tq, other=float("inf"))
                lse = tl.where(lse == -float("inf"), float("inf"), lse)[None, :]
                delta = tl.load(DELTA + at, mask=rows < Tq, other=0.0)[None, :]
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                if SUMS:
                    q_sums = load_rows(Q + b.to(tl.int64) * q_b + h * q_h + KW, rows, cs, Tq, DW - KW, q_t, False)
                    s = tl.dot(k_sums, tl.trans(q_sums), s, input_precision=PRECISION)
                if ALIBI or border == 1:
                    qp = tl.load(QP + rows, mask=rows < Tq, other=0)[None, :]
                bias = slope * tl.abs(kp - qp).to(tl.float32) if ALIBI else 0.0
                p, slope_of_cap = probabilities(s, lse, bias, scale, cap, CAP, ALIBI)
                if border == 1:
                    qd = tl.load(QD + rows, mask=rows < Tq, other=-4)[None, :]
                    p = tl.where(seen(qd, kd, kp - qp, left, right, LEFT, RIGHT), p, 0.0)
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                dropped = p
                if DROP:
                    qi = tl.load(QI + rows, mask=rows < Tq, other=0)[None, :]
                    keep = kept(key, qi, ki, threshold)
                    dropped = tl.where(keep, p * keep_scale, 0.0)
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                dv += tl.dot(dropped.to(do.dtype), do, input_precision=PRECISION)
                ds = p * (dp - delta)
                if CAP:
                    ds *= slope_of_cap
                if SUMS:
                    dc += tl.sum(ds, 1)
                dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    row = (b * Tk + keys).to(tl.int64)[:, None] * groups + g
    for_k, for_v = DK + row * DW + columns[None, :], DV + row * VW + cv[None, :]
    k_mask, v_mask = (keys < Tk)[:, None] & (columns < KW)[None, :], (keys < Tk)[:, None] & (cv < VW)[None, :]
    tl.store(for_k, (dk * scale).to(DK.dtype.element_ty), mask=k_mask)
    if SUMS:
        tl.store(DC + bg.to(tl.int64) * Tk + keys, dc, mask=keys < Tk)
    tl.store(for_v, dv.to(DV.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=CHANGING)
def backward_queries(
    Q, K, V, DO, L, DELTA, DQ, DC, LIST, COUNTS, QP, QD, QI, KP, KD, KI, SLOPES, HEADS,
    scale, cap, left, right, keep_scale, threshold, seed_lo, seed_hi,
    Tq, Tk, H, groups, tiles, slope_rows,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    KW, VW, DW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr, SUMS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (contiguous ``[B, Tq, H, K]``) of BM rows of one head."""
    tile, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    g = h // (H // groups)
    rows, ck, cv = tile * BM + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    q = load_rows(Q + b.to(tl.int64) * q_b + h * q_h, rows, ck, Tq, KW, q_t, FULL_K)
    do = load_rows(DO + b.to(tl.int64) * o_b + h * o_h, rows, cv, Tq, VW, o_t, FULL_V)
    qp = tl.load(QP + rows, mask=rows < Tq, other=0)[:, None]
    qd = tl.load(QD + rows, mask=rows < Tq, other=-4)[:, None]
    at = bh.to(tl.int64) * Tq + rows
    lse = tl.load(L + at, mask=rows < Tq, other=float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse)[:, None]
    delta = tl.load(DELTA + at, mask=rows < Tq, other=0.0)[:, None]
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + (b % slope_rows) * H + h)
    if DROP:
        qi = tl.load(QI + rows, mask=rows < Tq, other=0)[:, None]
        key = dropout_key(b, tl.load(HEADS + h), seed_lo, seed_hi)
    if SUMS:
        cs = tl.arange(0, SUMS)
        q_sums = load_rows(Q + b.to(tl.int64) * q_b + h * q_h + KW, rows, cs, Tq, DW - KW, q_t, False)
        dc = tl.zeros((BM,), tl.float32)
    dq = tl.zeros((BM, BK), tl.float32)
    whole, count = tl.load(COUNTS + 2 * tile), tl.load(COUNTS + 2 * tile + 1)
    K += b.to(tl.int64) * k_b + g * k_h
    V += b.to(tl.int64) * v_b + g * v_h
    for border in tl.static_range(2):
        for n in range(border * whole, whole + border * (count - whole)):
            keys = tl.load(LIST + tile.to(tl.int64) * tiles + n) * BN + tl.arange(0, BN)
            k = load_rows(K, keys, ck, Tk, KW, k_t, FULL_K, border == 0)
            v = load_rows(V, keys, cv, Tk, VW, v_t, FULL_V, border == 0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SUMS:
                k_sums = load_rows(K + KW, keys, cs, Tk, DW - KW, k_t, False, border == 0)
                s = tl.dot(q_sums, tl.trans(k_sums), s, input_precision=PRECISION)
            if ALIBI or border == 1:
                kp = tl.load(KP + keys, mask=keys < Tk, other=0)[None, :]
            bias = slope * tl.abs(kp - qp).to(tl.float32) if ALIBI else 0.0
            p, slope_of_cap = probabilities(s, lse, bias, scale, cap, CAP, ALIBI)
            if border == 1:
                kd = tl.load(KD + keys, mask=keys < Tk, other=-3)[None, :]
                p = tl.where(seen(qd, kd, kp - qp, left, right, LEFT, RIGHT), p, 0.0)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if DROP:
                ki = tl.load(KI + keys, mask=keys < Tk, other=0)[None, :]
                dp = tl.where(kept(key, qi, ki, threshold), dp * keep_scale, 0.0)
            ds = p * (dp - delta)
            if CAP:
                ds *= slope_of_cap
            if SUMS:
                dc += tl.sum(ds, 1)
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    into = DQ + ((b * Tq + rows).to(tl.int64)[:, None] * H + h) * DW + ck[None, :]
    mask = (rows < Tq)[:, None] & (ck < KW)[None, :]
    tl.store(into, (dq * scale).to(DQ.dtype.element_ty), mask=mask)
    if SUMS:
        tl.store(DC + at, dc, mask=rows < Tq)
