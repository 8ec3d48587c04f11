"""Device code for queries that choose their keys: one program a query and some of the heads that read a key head.

    slots   choice n of a query is `block` keys from place c on; slot s is the key at place  c[s // BLOCK] + s % BLOCK
    here    the row of that place among the keys at hand, or none

What a score costs is memory: a program reads its keys one by one, and in the backward pass adds to their gradients with
atomics, for no other order puts the queries of a key side by side. Two forms: keys and values apart; and SHARED, where
the value is the first VW columns of the key, as of latents, so that it is read once and has one gradient.

Going back, keys are the rows of every product and a query's heads its columns: scores are formed once, of latents one
product of ``[ds | p]`` and ``[q ; do]`` adds to the gradients of keys, and nothing that comes from accumulators is
transposed on the left, which Triton 3.4 to 3.7 miscompiles on Hopper. Widths are constants there, so that masks that
hide nothing are none: they take registers. 64 keys at a time with 8 warps end with an illegal memory access on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
CHANGING = ("left", "right", "Tq", "S", "ends")
"""Arguments that change from call to call: no kernel is compiled anew for them."""


@triton.jit
def slots_at(
    CHOSEN, PLACES, KP, KD, slots, S, ends, qp, qd, left, right,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(row of each slot's key, whether the query sees it)."""
    c = tl.load(CHOSEN + slots // BLOCK, mask=slots < S * BLOCK, other=-1)
    place = c + slots % BLOCK
    seen = (c >= 0) & (place < ends)
    row = tl.load(PLACES + place, mask=seen, other=-1)
    seen = seen & (row >= 0)
    distance = tl.load(KP + row, mask=seen, other=0) - qp
    seen = seen & (tl.load(KD + row, mask=seen, other=-3) == qd)
    if LEFT:
        seen = seen & (distance >= -left)
    if RIGHT:
        seen = seen & (distance <= right)
    return row.to(tl.int64), seen


@triton.jit(do_not_specialize=CHANGING)
def forward(
    Q, K, V, O, L, CHOSEN, PLACES, QP, QD, KP, KD,
    scale, left, right, Tq, S, ends, G, chosen_heads,
    c_b, c_t, c_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    KW, RW, VW,
    H: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and lse of one query, for BG of the G heads that read key head g. Keys have KW + RW columns, values VW."""
    t, parts = tl.program_id(0), tl.cdiv(G, BG)
    part, bg = tl.program_id(1) % parts, tl.program_id(1) // parts
    groups = H // G
    b, g = (bg // groups).to(tl.int64), bg % groups
    heads, n = part * BG + tl.arange(0, BG), tl.arange(0, BN)
    ck, cr, cv = tl.arange(0, BK), tl.arange(0, BR), tl.arange(0, BV)
    inside, head = heads < G, g * G + heads
    qp, qd = tl.load(QP + t), tl.load(QD + t)
    row = Q + b * q_b + t.to(tl.int64) * q_t + head[:, None] * q_h
    q = tl.load(row + ck[None, :], mask=inside[:, None] & (ck < KW)[None, :], other=0.0)
    if BR > 1:
        qr = tl.load(row + KW + cr[None, :], mask=inside[:, None] & (cr < RW)[None, :], other=0.0)
    CHOSEN += b * c_b + t.to(tl.int64) * c_t + (g % chosen_heads) * c_h
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    top = tl.full((BG,), -float("inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, BV), tl.float32)
    for first in range(0, S * BLOCK, BN):
        at, seen = slots_at(CHOSEN, PLACES, KP, KD, first + n, S, ends, qp, qd, left, right, BLOCK, LEFT, RIGHT)
        if tl.max(seen.to(tl.int32), 0) > 0:
            k = tl.load(K + at[:, None] * k_t + ck[None, :], mask=seen[:, None] & (ck < KW)[None, :], other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if BR > 1:
                kr = K + at[:, None] * k_t + KW + cr[None, :]
                kr = tl.load(kr, mask=seen[:, None] & (cr < RW)[None, :], other=0.0)
                s += tl.dot(qr, tl.trans(kr), input_precision=PRECISION)
            s = tl.where(seen[None, :], s * (scale * LOG2E), -float("inf"))
            new = tl.maximum(top, tl.max(s, 1))
            keep, p = tl.exp2(top - new), tl.exp2(s - new[:, None])
            top, total = new, total * keep + tl.sum(p, 1)
            if SHARED:
                acc = acc * keep[:, None] + tl.dot(p.to(k.dtype), k, input_precision=PRECISION)
            else:
                v = tl.load(V + at[:, None] * v_t + cv[None, :], mask=seen[:, None] & (cv < VW)[None, :], other=0.0)
                acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    some = total > 0
    o = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, -float("inf"))
    into = O + b * o_b + t.to(tl.int64) * o_t + head[:, None] * o_h + cv[None, :]
    tl.store(into, o.to(O.dtype.element_ty), mask=inside[:, None] & (cv < VW)[None, :])
    tl.store(L + (b * H + head) * Tq + t, lse, mask=inside)


@triton.jit
def within(rows, columns, W: tl.constexpr, B: tl.constexpr):
    """The mask of `rows` and the first W of B columns; without a comparison, which takes registers, where it is all."""
    if W == B:
        return tl.broadcast_to(rows[:, None], rows.shape[0], B)
    return rows[:, None] & (columns < W)[None, :]


@triton.jit
def side_by_side(x, y):
    """``[m, n], [m, n] → [2·m, n]``."""
    return tl.permute(tl.join(x, y), (2, 0, 1)).reshape(2 * x.shape[0], x.shape[1])


@triton.jit(do_not_specialize=CHANGING)
def backward(
    Q, K, V, DO, L, DELTA, DQ, DK, DV, CHOSEN, PLACES, QP, QD, KP, KD,
    scale, left, right, Tq, S, ends, G, chosen_heads,
    c_b, c_t, c_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    KW: tl.constexpr, RW: tl.constexpr, VW: tl.constexpr,
    H: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one query and BG heads; its shares of dk and dv are added to fp32 sums. SHARED: dv is part of dk."""
    t, parts = tl.program_id(0), tl.cdiv(G, BG)
    part, bg = tl.program_id(1) % parts, tl.program_id(1) // parts
    groups = H // G
    b, g = (bg // groups).to(tl.int64), bg % groups
    heads, n = part * BG + tl.arange(0, BG), tl.arange(0, BN)
    ck, cr, cv = tl.arange(0, BK), tl.arange(0, BR), tl.arange(0, BV)
    inside, head = heads < G, g * G + heads
    qp, qd = tl.load(QP + t), tl.load(QD + t)
    row = Q + b * q_b + t.to(tl.int64) * q_t + head[:, None] * q_h
    q = tl.load(row + ck[None, :], mask=within(inside, ck, KW, BK), other=0.0)
    do = DO + b * o_b + t.to(tl.int64) * o_t + head[:, None] * o_h
    do = tl.load(do + cv[None, :], mask=within(inside, cv, VW, BV), other=0.0)
    if SHARED:
        two = side_by_side(q, do)
    dq = tl.zeros((BK, BG), tl.float32)
    if BR > 1:
        qr = tl.load(row + KW + cr[None, :], mask=within(inside, cr, RW, BR), other=0.0)
        dqr = tl.zeros((BR, BG), tl.float32)
    lse = tl.load(L + (b * H + head) * Tq + t, mask=inside, other=float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse) * LOG2E
    delta = tl.load(DELTA + (b * H + head) * Tq + t, mask=inside, other=0.0)
    CHOSEN += b * c_b + t.to(tl.int64) * c_t + (g % chosen_heads) * c_h
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    DK += b * dk_b + g * dk_h
    DV += b * dv_b + g * dv_h
    for first in range(0, S * BLOCK, BN):
        at, seen = slots_at(CHOSEN, PLACES, KP, KD, first + n, S, ends, qp, qd, left, right, BLOCK, LEFT, RIGHT)
        if tl.max(seen.to(tl.int32), 0) > 0:
            k = tl.load(K + at[:, None] * k_t + ck[None, :], mask=within(seen, ck, KW, BK), other=0.0)
            if SHARED:
                v = k
            else:
                v = tl.load(V + at[:, None] * v_t + cv[None, :], mask=within(seen, cv, VW, BV), other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            if BR > 1:
                kr = K + at[:, None] * k_t + KW + cr[None, :]
                kr = tl.load(kr, mask=within(seen, cr, RW, BR), other=0.0)
                s += tl.dot(kr, tl.trans(qr), input_precision=PRECISION)
            p = tl.where(seen[:, None], tl.exp2(s * (scale * LOG2E) - lse[None, :]), 0.0)
            ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :]) * scale
            p, ds = p.to(do.dtype), ds.to(q.dtype)
            dq += tl.dot(tl.trans(k), ds, input_precision=PRECISION)
            if SHARED:
                dk = tl.dot(tl.trans(side_by_side(tl.trans(ds), tl.trans(p))), two, input_precision=PRECISION)
            else:
                dk = tl.dot(ds, q, input_precision=PRECISION)
                dv = tl.dot(p, do, input_precision=PRECISION)
                into = DV + at[:, None] * dv_t + cv[None, :]
                tl.atomic_add(into, dv, mask=within(seen, cv, VW, BV), sem="relaxed")
            into = DK + at[:, None] * dk_t + ck[None, :]
            tl.atomic_add(into, dk, mask=within(seen, ck, KW, BK), sem="relaxed")
            if BR > 1:
                dqr += tl.dot(tl.trans(kr), ds, input_precision=PRECISION)
                dkr = tl.dot(ds, qr, input_precision=PRECISION)
                into = DK + at[:, None] * dk_t + KW + cr[None, :]
                tl.atomic_add(into, dkr, mask=within(seen, cr, RW, BR), sem="relaxed")
    row = DQ + b * dq_b + t.to(tl.int64) * dq_t + head[None, :] * dq_h
    tl.store(row + ck[:, None], dq.to(DQ.dtype.element_ty), mask=tl.trans(within(inside, ck, KW, BK)))
    if BR > 1:
        tl.store(row + KW + cr[:, None], dqr.to(DQ.dtype.element_ty), mask=tl.trans(within(inside, cr, RW, BR)))
