"""Device code of softmax attention where each query sees a span of the keys: documents, windows and order alone.

A program has some rows, of one long document or of several short ones, and walks the keys that any of them sees, from
the first one on: ``start + n · BN``. Tiles ``whole … until − 1`` are seen whole; in the others two comparisons with the
ends of each row's span are the mask. Scores are multiplied once, by ``scale · log2 e``, on their way into a power of
two. As in `kernels`, no atomics, and scores of the keys' kernel are formed transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
CHANGING = ("Tq", "Tk", "H", "groups", "items", "apart")
"""Arguments that change from call to call: no kernel is compiled anew for them."""


@triton.jit
def place(items, apart):
    """(item, row of batch and head) of this program: one head after the other, but the last ones all at once, so that
    the dearest items, which stand first, are not what everything waits for at the end."""
    at, heads = tl.program_id(0), tl.num_programs(0) // items
    turn = at - (heads - apart) * items
    if turn < 0:
        return at % items, at // items
    return turn // apart, heads - apart + turn % apart


@triton.jit
def own_rows(X, rows, columns, width, stride, FULL: tl.constexpr):
    """``X[rows, columns]``, rows that exist, zero in columns that do not."""
    at = X + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=(columns < width)[None, :], other=0.0)


@triton.jit
def tile_of(
    X, b, start, h, last, width, s_b, s_t, s_h, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of ``X [B, T, H, D]`` from `start` on: by its descriptor, else by addresses, and then what stands
    behind the last row is that row again (no span reaches it)."""
    if BULK:
        x = X.load([b, start, h, 0]).reshape(ROWS, COLUMNS)
    else:
        rows, columns = tl.minimum(tl.arange(0, ROWS), last - start), tl.arange(0, COLUMNS)
        at = X + b.to(tl.int64) * s_b + h * s_h + start.to(tl.int64) * s_t + (rows[:, None] * s_t + columns[None, :])
        if FULL:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(columns < width)[None, :], other=0.0)
    return x


@triton.jit
def numbers_of(X, at, start, last, ROWS: tl.constexpr, BULK: tl.constexpr):
    """ROWS numbers of ``X`` from `start` on, of rows that stand from `at` on; behind the last row others."""
    if BULK:
        x = X.load([at + start])
    else:
        x = tl.load(X + at.to(tl.int64) + tl.minimum(start + tl.arange(0, ROWS), last))
    return x


@triton.jit(do_not_specialize=CHANGING)
def forward(
    Q, K, V, O, L, WORK, LOW, HIGH, scale, Tq, Tk, H, groups, items, apart,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, KW, VW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """o and lse of the rows of one item, of one head."""
    item, bh = place(items, apart)
    b, h = bh // H, bh % H
    g = h // (H // groups)
    WORK += item * 6
    row, end, start = tl.load(WORK), tl.load(WORK + 1), tl.load(WORK + 2)
    whole, until, count = tl.load(WORK + 3), tl.load(WORK + 4), tl.load(WORK + 5)
    rows, ck, cv = row + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    q = own_rows(Q + b.to(tl.int64) * q_b + h * q_h, tl.minimum(rows, Tq - 1), ck, KW, q_t, FULL_K)
    low = tl.load(LOW + rows, mask=rows < end, other=0)[:, None]
    high = tl.load(HIGH + rows, mask=rows < end, other=0)[:, None]
    acc = tl.zeros((BM, BV), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    factor = scale * LOG2E
    for n in range(count):
        keys = start + n * BN + tl.arange(0, BN)
        k = tile_of(K, b, start + n * BN, g, Tk - 1, KW, k_b, k_t, k_h, BN, BK, FULL_K, BULK)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if (n < whole) | (n >= until):
            s = tl.where((keys[None, :] >= low) & (keys[None, :] < high), s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1) * factor)
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(s * factor - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = tile_of(V, b, start + n * BN, g, Tk - 1, VW, v_b, v_t, v_h, BN, BV, FULL_V, BULK)
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
    Q, K, V, DO, L, DELTA, DK, DV, WORK, LOW, HIGH, scale, Tq, Tk, H, groups, items, apart,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, KW, VW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """dk and dv (contiguous ``[B, Tk, groups, ·]``) of the keys of one item, over all query heads that read them."""
    item, bg = place(items, apart)
    b, g = bg // groups, bg % groups
    WORK += item * 6
    first, end, start = tl.load(WORK), tl.load(WORK + 1), tl.load(WORK + 2)
    whole, until, count = tl.load(WORK + 3), tl.load(WORK + 4), tl.load(WORK + 5)
    keys, ck, cv = first + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    there = tl.minimum(keys, Tk - 1)
    k = own_rows(K + b.to(tl.int64) * k_b + g * k_h, there, ck, KW, k_t, FULL_K)
    v = own_rows(V + b.to(tl.int64) * v_b + g * v_h, there, cv, VW, v_t, FULL_V)
    low = tl.load(LOW + keys, mask=keys < end, other=0)[:, None]
    high = tl.load(HIGH + keys, mask=keys < end, other=0)[:, None]
    dk, dv = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BV), tl.float32)
    factor = scale * LOG2E
    for h in range(g * (H // groups), (g + 1) * (H // groups)):
        of_head = (b * H + h) * Tq
        for n in range(count):
            rows = start + n * BM + tl.arange(0, BM)
            q = tile_of(Q, b, start + n * BM, h, Tq - 1, KW, q_b, q_t, q_h, BM, BK, FULL_K, BULK)
            do = tile_of(DO, b, start + n * BM, h, Tq - 1, VW, o_b, o_t, o_h, BM, BV, FULL_V, BULK)
            lse = numbers_of(L, of_head, start + n * BM, Tq - 1, BM, BULK)[None, :] * LOG2E
            delta = numbers_of(DELTA, of_head, start + n * BM, Tq - 1, BM, BULK)[None, :]
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            p = tl.exp2(s * factor - lse)
            if (n < whole) | (n >= until):
                p = tl.where((rows[None, :] >= low) & (rows[None, :] < high), p, 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = p * (dp - delta)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    row = (b * Tk + keys).to(tl.int64)[:, None] * groups + g
    for_k, for_v = DK + row * KW + ck[None, :], DV + row * VW + cv[None, :]
    k_mask, v_mask = (keys < end)[:, None] & (ck < KW)[None, :], (keys < end)[:, None] & (cv < VW)[None, :]
    tl.store(for_k, (dk * scale).to(DK.dtype.element_ty), mask=k_mask)
    tl.store(for_v, dv.to(DV.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=CHANGING)
def backward_queries(
    Q, K, V, DO, L, DELTA, DQ, WORK, LOW, HIGH, scale, Tq, Tk, H, groups, items, apart,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, KW, VW,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FULL_K: tl.constexpr, FULL_V: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """dq (contiguous ``[B, Tq, H, K]``) of the rows of one item, of one head."""
    item, bh = place(items, apart)
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
    dq = tl.zeros((BM, BK), tl.float32)
    factor = scale * LOG2E
    for n in range(count):
        keys = start + n * BN + tl.arange(0, BN)
        k = tile_of(K, b, start + n * BN, g, Tk - 1, KW, k_b, k_t, k_h, BN, BK, FULL_K, BULK)
        v = tile_of(V, b, start + n * BN, g, Tk - 1, VW, v_b, v_t, v_h, BN, BV, FULL_V, BULK)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(s * factor - lse)
        if (n < whole) | (n >= until):
            p = tl.where((keys[None, :] >= low) & (keys[None, :] < high), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    into = DQ + ((b * Tq + rows).to(tl.int64)[:, None] * H + h) * KW + ck[None, :]
    tl.store(into, (dq * scale).to(DQ.dtype.element_ty), mask=(rows < end)[:, None] & (ck < KW)[None, :])
