"""Device code of softmax attention where each query sees a span of the keys: documents, windows and order alone.

A program has some rows, of one long document or of several short ones, and walks the keys that any of them sees, from
the first one on: ``start + n · BN``. Tiles ``whole … until − 1`` are seen whole; in the others two comparisons with the
ends of each row's span are the mask. Tiles of the walk are fetched by descriptors, which leaves registers to products;
behind the last row these give zeros, or another head's numbers, which no span reaches. Scores are multiplied once, by
``scale · log2 e``, on their way into a power of two. Running sums are SUMS channels behind a head's. Programs of a head
start with those that have most to do. As in `kernels`, no atomics, and scores of the keys' kernel are formed
transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
CHANGING = ("Tq", "Tk", "H", "groups", "items", "Tn")
"""Arguments that change from call to call: no kernel is compiled anew for them."""


@triton.jit
def own_rows(X, rows, columns, width, stride, FULL: tl.constexpr):
    """``X[rows, columns]``, rows that exist, zero in columns that do not."""
    at = X + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=(columns < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=CHANGING)
def forward(
    Q, K, V, K_SUMS, O, L, WORK, LOW, HIGH, scale, Tq, Tk, H, groups, items, Tn,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, KW, VW, DW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and lse of the rows of one item, of one head."""
    item, bh = tl.program_id(0) % items, tl.program_id(0) // items
    b, h = bh // H, bh % H
    g = h // (H // groups)
    WORK += item * 6
    row, end, start = tl.load(WORK), tl.load(WORK + 1), tl.load(WORK + 2)
    whole, until, count = tl.load(WORK + 3), tl.load(WORK + 4), tl.load(WORK + 5)
    rows, ck, cv = row + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    q = own_rows(Q + b.to(tl.int64) * q_b + h * q_h, tl.minimum(rows, Tq - 1), ck, KW, q_t, FULL_K)
    low = tl.load(LOW + rows, mask=rows < end, other=0)[:, None]
    high = tl.load(HIGH + rows, mask=rows < end, other=0)[:, None]
    if SUMS:
        of_sums = Q + b.to(tl.int64) * q_b + h * q_h + KW
        q_sums = own_rows(of_sums, tl.minimum(rows, Tq - 1), tl.arange(0, SUMS), DW - KW, q_t, False)
    acc = tl.zeros((BM, BV), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    factor = scale * LOG2E
    for n in range(count):
        keys = start + n * BN + tl.arange(0, BN)
        k = K.load([b, start + n * BN, g, 0]).reshape(BN, BK)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SUMS:
            k_sums = K_SUMS.load([b, start + n * BN, g, 0]).reshape(BN, SUMS)
            s = tl.dot(q_sums, tl.trans(k_sums), s, input_precision=PRECISION)
        if (n < whole) | (n >= until):
            s = tl.where((keys[None, :] >= low) & (keys[None, :] < high), s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1) * factor)
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(tl.fma(s, factor, -safe[:, None]))
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = V.load([b, start + n * BN, g, 0]).reshape(BN, BV)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, -float("inf"))
    at = L + bh.to(tl.int64) * Tq + rows
    o_at = O + b.to(tl.int64) * o_b + h * o_h + rows[:, None].to(tl.int64) * o_t + cv[None, :]
    tl.store(at, lse, mask=rows < end)
    tl.store(o_at, acc.to(O.dtype.element_ty), mask=(rows < end)[:, None] & (cv < VW)[None, :])


@triton.jit(do_not_specialize=CHANGING)
def backward_keys(
    Q, K, V, DO, Q_SUMS, L, DELTA, DK, DV, DC, WORK, LOW, HIGH, scale, Tq, Tk, H, groups, items, Tn,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, KW, VW, DW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (contiguous ``[B, Tk, groups, ·]``) of the keys of one item, over all query heads that read them."""
    item, bg = tl.program_id(0) % items, tl.program_id(0) // items
    b, g = bg // groups, bg % groups
    WORK += item * 6
    first, end, start = tl.load(WORK), tl.load(WORK + 1), tl.load(WORK + 2)
    whole, until, count = tl.load(WORK + 3), tl.load(WORK + 4), tl.load(WORK + 5)
    keys, columns, cv = first + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    there = tl.minimum(keys, Tk - 1)
    k = own_rows(K + b.to(tl.int64) * k_b + g * k_h, there, columns, KW, k_t, FULL_K)
    v = own_rows(V + b.to(tl.int64) * v_b + g * v_h, there, cv, VW, v_t, FULL_V)
    low = tl.load(LOW + keys, mask=keys < end, other=0)[:, None]
    high = tl.load(HIGH + keys, mask=keys < end, other=0)[:, None]
    if SUMS:
        of_sums = K + b.to(tl.int64) * k_b + g * k_h + KW
        k_sums = own_rows(of_sums, there, tl.arange(0, SUMS), DW - KW, k_t, False)
        dc = tl.zeros((BN,), tl.float32)
    dk, dv = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BV), tl.float32)
    factor = scale * LOG2E
    for h in range(g * (H // groups), (g + 1) * (H // groups)):
        of_head = (b * H + h) * Tn
        for n in range(count):
            rows = start + n * BM + tl.arange(0, BM)
            q = Q.load([b, start + n * BM, h, 0]).reshape(BM, BK)
            do = DO.load([b, start + n * BM, h, 0]).reshape(BM, BV)
            lse = L.load([of_head + start + n * BM])[None, :] * LOG2E
            delta = DELTA.load([of_head + start + n * BM])[None, :]
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            if SUMS:
                q_sums = Q_SUMS.load([b, start + n * BM, h, 0]).reshape(BM, SUMS)
                s = tl.dot(k_sums, tl.trans(q_sums), s, input_precision=PRECISION)
            p = tl.exp2(tl.fma(s, factor, -lse))
            if (n < whole) | (n >= until):
                p = tl.where((rows[None, :] >= low) & (rows[None, :] < high), p, 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = p * (dp - delta)
            if SUMS:
                dc += tl.sum(ds, 1)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    row = (b * Tk + keys).to(tl.int64)[:, None] * groups + g
    for_k, for_v = DK + row * DW + columns[None, :], DV + row * VW + cv[None, :]
    k_mask, v_mask = (keys < end)[:, None] & (columns < KW)[None, :], (keys < end)[:, None] & (cv < VW)[None, :]
    tl.store(for_k, (dk * scale).to(DK.dtype.element_ty), mask=k_mask)
    if SUMS:
        tl.store(DC + bg.to(tl.int64) * Tk + keys, dc, mask=keys < end)
    tl.store(for_v, dv.to(DV.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=CHANGING)
def backward_queries(
    Q, K, V, K_SUMS, DO, L, DELTA, DQ, DC, WORK, LOW, HIGH, scale, Tq, Tk, H, groups, items, Tn,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, KW, VW, DW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (contiguous ``[B, Tq, H, K]``) of the rows of one item, of one head."""
    item, bh = tl.program_id(0) % items, tl.program_id(0) // items
    b, h = bh // H, bh % H
    g = h // (H // groups)
    WORK += item * 6
    row, end, start = tl.load(WORK), tl.load(WORK + 1), tl.load(WORK + 2)
    whole, until, count = tl.load(WORK + 3), tl.load(WORK + 4), tl.load(WORK + 5)
    rows, ck, cv = row + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    here = tl.minimum(rows, Tq - 1)
    q = own_rows(Q + b.to(tl.int64) * q_b + h * q_h, here, ck, KW, q_t, FULL_K)
    do = own_rows(DO + b.to(tl.int64) * o_b + h * o_h, here, cv, VW, o_t, FULL_V)
    low = tl.load(LOW + rows, mask=rows < end, other=0)[:, None]
    high = tl.load(HIGH + rows, mask=rows < end, other=0)[:, None]
    lse = tl.load(L + bh.to(tl.int64) * Tq + here)[:, None] * LOG2E
    delta = tl.load(DELTA + bh.to(tl.int64) * Tq + here)[:, None]
    if SUMS:
        of_sums = Q + b.to(tl.int64) * q_b + h * q_h + KW
        q_sums = own_rows(of_sums, here, tl.arange(0, SUMS), DW - KW, q_t, False)
        dc = tl.zeros((BM,), tl.float32)
    dq = tl.zeros((BM, BK), tl.float32)
    factor = scale * LOG2E
    for n in range(count):
        keys = start + n * BN + tl.arange(0, BN)
        k = K.load([b, start + n * BN, g, 0]).reshape(BN, BK)
        v = V.load([b, start + n * BN, g, 0]).reshape(BN, BV)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SUMS:
            k_sums = K_SUMS.load([b, start + n * BN, g, 0]).reshape(BN, SUMS)
            s = tl.dot(q_sums, tl.trans(k_sums), s, input_precision=PRECISION)
        p = tl.exp2(tl.fma(s, factor, -lse))
        if (n < whole) | (n >= until):
            p = tl.where((keys[None, :] >= low) & (keys[None, :] < high), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta)
        if SUMS:
            dc += tl.sum(ds, 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    into = DQ + ((b * Tq + rows).to(tl.int64)[:, None] * H + h) * DW + ck[None, :]
    tl.store(into, (dq * scale).to(DQ.dtype.element_ty), mask=(rows < end)[:, None] & (ck < KW)[None, :])
    if SUMS:
        tl.store(DC + bh.to(tl.int64) * Tq + rows, dc, mask=rows < end)
