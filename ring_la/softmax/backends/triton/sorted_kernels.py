"""Device code for queries that choose their keys, over lists: which rows a query reads is found out first, and sorted.

    listed     of each query the rows of its chosen keys at hand, ascending, and how many there are
    forward    o and lse of a query over its list
    backward   dq of a query; its shares of dk and dv are added to fp32 sums

In `chosen_kernels` every tile of keys waits for four loads one after the other (the choice, the row of its place, that
row's position and document) before its keys are asked for. A list is one load that waits for nothing: the keys of the
next tiles are under way to shared memory while these are multiplied. A list ends where what a query reads ends, so a
ring that has a part of the keys at hand goes through no more than these. Rows are sorted: queries side by side read
about the same ones at the same time, so that what they share comes from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chosen_kernels import LN2, LOG2E, side_by_side, slots_at, within

CHANGING = ("left", "right", "Tq", "S", "ends", "slots")
"""Arguments that change from call to call: no kernel is compiled anew for them."""
NONE = tl.constexpr(2147483647)
"""Behind all rows."""


@triton.jit(do_not_specialize=CHANGING)
def listed(
    ROWS, COUNT, CHOSEN, PLACES, QP, QD, KP, KD, left, right, Tq, S, ends, heads, c_b, c_t, c_h,
    BS: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """ROWS ``[B, Tq, heads, S · BLOCK]`` in stretches of BS slots, each ascending; COUNT ``[B, Tq, heads]``."""
    t, h, b = tl.program_id(0), tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    n = tl.arange(0, BS)
    CHOSEN += b * c_b + t.to(tl.int64) * c_t + h * c_h
    qp, qd, at = tl.load(QP + t), tl.load(QD + t), (b * Tq + t) * heads + h
    ROWS += at * (S * BLOCK)
    count = 0
    for first in range(0, S * BLOCK, BS):
        row, seen = slots_at(CHOSEN, PLACES, KP, KD, first + n, S, ends, qp, qd, left, right, BLOCK, LEFT, RIGHT)
        row = tl.sort(tl.where(seen, row.to(tl.int32), NONE))
        found = tl.sum(seen.to(tl.int32), 0)
        tl.store(ROWS + count + n, row, mask=n < found)
        count += found
    tl.store(COUNT + at, count)


@triton.jit
def rows_at(ROWS, first, n, count):
    """(rows of a tile of the list, which are there); in the places of those that are not the last one again."""
    return tl.load(ROWS + tl.minimum(first + n, count - 1)).to(tl.int64), first + n < count


@triton.jit(do_not_specialize=CHANGING)
def forward(
    Q, K, V, O, L, ROWS, COUNT, scale, Tq, slots, G, chosen_heads, lists,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    KW: tl.constexpr, RW: tl.constexpr, VW: tl.constexpr,
    H: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BG of the G heads that read key head g. Keys have KW + RW columns, values VW; `lists` queries have one."""
    t, parts = tl.program_id(0), tl.cdiv(G, BG)
    part, bg = tl.program_id(1) % parts, tl.program_id(1) // parts
    groups = H // G
    b, g = (bg // groups).to(tl.int64), bg % groups
    heads, n = part * BG + tl.arange(0, BG), tl.arange(0, BN)
    ck, cr, cv = tl.arange(0, BK), tl.arange(0, BR), tl.arange(0, BV)
    inside, head = heads < G, g * G + heads
    row = Q + b * q_b + t.to(tl.int64) * q_t + head[:, None] * q_h
    q = tl.load(row + ck[None, :], mask=within(inside, ck, KW, BK), other=0.0)
    if BR > 1:
        qr = tl.load(row + KW + cr[None, :], mask=within(inside, cr, RW, BR), other=0.0)
    mine = (b * lists + t) * chosen_heads + g % chosen_heads
    ROWS += mine * slots
    count = tl.load(COUNT + mine)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    top = tl.full((BG,), -float("inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, BV), tl.float32)
    for first in range(0, count, BN):
        at, here = rows_at(ROWS, first, n, count)
        k = tl.load(K + at[:, None] * k_t + ck[None, :], mask=within(at >= 0, ck, KW, BK), other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BR > 1:
            kr = K + at[:, None] * k_t + KW + cr[None, :]
            kr = tl.load(kr, mask=within(at >= 0, cr, RW, BR), other=0.0)
            s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION)
        s = tl.where(here[None, :], s * (scale * LOG2E), -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        keep, p = tl.exp2(top - new), tl.exp2(s - new[:, None])
        top, total = new, total * keep + tl.sum(p, 1)
        if SHARED:
            acc = tl.dot(p.to(k.dtype), k, acc * keep[:, None], input_precision=PRECISION)
        else:
            v = tl.load(V + at[:, None] * v_t + cv[None, :], mask=within(at >= 0, cv, VW, BV), other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    some = total > 0
    o = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, -float("inf"))
    into = O + b * o_b + t.to(tl.int64) * o_t + head[:, None] * o_h + cv[None, :]
    tl.store(into, o.to(O.dtype.element_ty), mask=within(inside, cv, VW, BV))
    tl.store(L + (b * H + head) * Tq + t, lse, mask=inside)


@triton.jit(do_not_specialize=CHANGING)
def backward(
    Q, K, V, DO, L, DELTA, DQ, DK, DV, ROWS, COUNT, scale, Tq, slots, G, chosen_heads, lists,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    KW: tl.constexpr, RW: tl.constexpr, VW: tl.constexpr,
    H: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `forward`; keys are the rows of every product. SHARED: dv is part of dk."""
    t, parts = tl.program_id(0), tl.cdiv(G, BG)
    part, bg = tl.program_id(1) % parts, tl.program_id(1) // parts
    groups = H // G
    b, g = (bg // groups).to(tl.int64), bg % groups
    heads, n = part * BG + tl.arange(0, BG), tl.arange(0, BN)
    ck, cr, cv = tl.arange(0, BK), tl.arange(0, BR), tl.arange(0, BV)
    inside, head = heads < G, g * G + heads
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
    mine = (b * lists + t) * chosen_heads + g % chosen_heads
    ROWS += mine * slots
    count = tl.load(COUNT + mine)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    DK += b * dk_b + g * dk_h
    DV += b * dv_b + g * dv_h
    for first in range(0, count, BN):
        at, here = rows_at(ROWS, first, n, count)
        k = tl.load(K + at[:, None] * k_t + ck[None, :], mask=within(at >= 0, ck, KW, BK), other=0.0)
        if SHARED:
            v = k
        else:
            v = tl.load(V + at[:, None] * v_t + cv[None, :], mask=within(at >= 0, cv, VW, BV), other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if BR > 1:
            kr = K + at[:, None] * k_t + KW + cr[None, :]
            kr = tl.load(kr, mask=within(at >= 0, cr, RW, BR), other=0.0)
            s = tl.dot(kr, tl.trans(qr), s, input_precision=PRECISION)
        p = tl.where(here[:, None], tl.exp2(s * (scale * LOG2E) - lse[None, :]), 0.0)
        ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :]) * scale
        p, ds = p.to(do.dtype), ds.to(q.dtype)
        dq = tl.dot(tl.trans(k), ds, dq, input_precision=PRECISION)
        if SHARED:
            dk = tl.dot(tl.trans(side_by_side(tl.trans(ds), tl.trans(p))), two, input_precision=PRECISION)
        else:
            dk = tl.dot(ds, q, input_precision=PRECISION)
            dv = tl.dot(p, do, input_precision=PRECISION)
            into = DV + at[:, None] * dv_t + cv[None, :]
            tl.atomic_add(into, dv, mask=within(here, cv, VW, BV), sem="relaxed")
        into = DK + at[:, None] * dk_t + ck[None, :]
        tl.atomic_add(into, dk, mask=within(here, ck, KW, BK), sem="relaxed")
        if BR > 1:
            dqr = tl.dot(tl.trans(kr), ds, dqr, input_precision=PRECISION)
            dkr = tl.dot(ds, qr, input_precision=PRECISION)
            into = DK + at[:, None] * dk_t + KW + cr[None, :]
            tl.atomic_add(into, dkr, mask=within(here, cr, RW, BR), sem="relaxed")
    row = DQ + b * dq_b + t.to(tl.int64) * dq_t + head[None, :] * dq_h
    tl.store(row + ck[:, None], dq.to(DQ.dtype.element_ty), mask=tl.trans(within(inside, ck, KW, BK)))
    if BR > 1:
        tl.store(row + KW + cr[:, None], dqr.to(DQ.dtype.element_ty), mask=tl.trans(within(inside, cr, RW, BR)))
