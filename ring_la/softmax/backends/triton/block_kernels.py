"""Device code for queries that choose blocks of keys: M queries side by side are a program, with BG heads each.

    forward   o and lse: of M · BG rows over the blocks that any of the M queries reads, each loaded once
    queries   dq, on the same way
    keys      dk and dv of a tile of places: over the queries that have chosen it, M at a time

`block_lists` has found out who reads what. A block that is read whole is one row and what follows it: its keys are
loaded without a look at a table, and the next block's row is at hand before it is wanted, so that keys are under way
while others are multiplied. Queries that do not read a block have scores of −∞ there. What needs a mask key by key
comes behind, in a loop of its own.

`keys` adds nothing in memory: a place belongs to one tile, so the sums stay in registers and are the same in every run.
No accumulator is transposed on the left, which Triton 3.4 to 3.7 miscompiles on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .block_lists import CHANGING
from .chosen_kernels import LN2, LOG2E, within

LOW = tl.constexpr(-1.0e30)
"""Below any score, and no infinity: −∞ less it is −∞."""


@triton.jit
def read_by(readers, m):
    """Of rows of queries m, which of them read a block."""
    return ((readers >> m) & 1) > 0


@triton.jit
def seen_by(PLACES, KP, KD, first, n, ends, qp, qd, left, right, END, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(rows of the keys at places first + n of a block that ends before END, whether queries see them)."""
    here = (first + n < ends) & (first + n < END)
    row = tl.load(PLACES + first + n, mask=here, other=-1)
    here = here & (row >= 0)
    distance = tl.load(KP + row, mask=here, other=0)[None, :] - qp[:, None]
    seen = here[None, :] & (tl.load(KD + row, mask=here, other=-3)[None, :] == qd[:, None])
    if LEFT:
        seen = seen & (distance >= -left)
    if RIGHT:
        seen = seen & (distance <= right)
    return tl.where(here, row, 0).to(tl.int64), seen


@triton.jit
def scored(q, k, off, top, total, factor, PRECISION: tl.constexpr):
    """(weights of a tile, what earlier sums keep, and the new largest score and sum), `off` being added to scores."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor + off
    new = tl.maximum(top, tl.max(s, 1))
    p, keep = tl.exp2(s - new[:, None]), tl.exp2(top - new)
    return p, keep, new, total * keep + tl.sum(p, 1)


@triton.jit
def scored_by(q, k, read, top, total, factor, PRECISION: tl.constexpr):
    """The same of a tile that a row reads whole or not at all: only the largest score is scaled by itself.
    scale is not negative."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    new = tl.where(read, tl.maximum(top, tl.max(s, 1) * factor), top)
    p, keep = tl.exp2(s * factor - tl.where(read, new, float("inf"))[:, None]), tl.exp2(top - new)
    return p, keep, new, total * keep + tl.sum(p, 1)


@triton.jit(do_not_specialize=CHANGING)
def forward(
    Q, K, V, O, L, AT, READERS, COUNTS, PLACES, QP, QD, KP, KD,
    scale, left, right, first, Tq, S, ends, groups, chosen_heads,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h,
    KW: tl.constexpr, VW: tl.constexpr, H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BG: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PRECISION: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """The queries from `first` on, those of the last group first: what is causal has most to do there.
    NEGATIVE: scale is."""
    group, heads = groups - 1 - tl.program_id(0), tl.cdiv(G, BG)
    part, bg = tl.program_id(1) % heads, tl.program_id(1) // heads
    b, g = (bg // (H // G)).to(tl.int64), bg % (H // G)
    r, n, ck, cv = tl.arange(0, M * BG), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    m, h, t = r // BG, part * BG + r % BG, first + group * M + r // BG
    inside, head = (h < G) & (t < Tq), g * G + h
    q = Q + b * q_b + t.to(tl.int64)[:, None] * q_t + head[:, None] * q_h + ck[None, :]
    q = tl.load(q, mask=within(inside, ck, KW, BK), other=0.0)
    mine = (b * groups + group) * chosen_heads + g % chosen_heads
    AT += mine * S * M
    READERS += mine * S * M
    wholes, parts = tl.load(COUNTS + mine * 2), tl.load(COUNTS + mine * 2 + 1)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    TILES: tl.constexpr = (BLOCK + BN - 1) // BN
    factor = scale * LOG2E
    top, total = tl.full((M * BG,), LOW, tl.float32), tl.zeros((M * BG,), tl.float32)
    acc = tl.zeros((M * BG, BV), tl.float32)
    at, readers = tl.load(AT), tl.load(READERS)
    for i in range(0, wholes * TILES):
        following = tl.minimum(i + 1, wholes * TILES - 1) // TILES
        next_at, next_readers = tl.load(AT + following), tl.load(READERS + following)
        row, some = (at + i % TILES * BN).to(tl.int64), i % TILES * BN + n < BLOCK
        if BLOCK % BN == 0:
            some = n >= 0
        k = tl.load(K + row * k_t + (n[:, None] * k_t + ck[None, :]), mask=within(some, ck, KW, BK), other=0.0)
        read = read_by(readers, m)
        if BLOCK % BN or NEGATIVE:
            off = tl.where(some[None, :] & read[:, None], 0.0, -float("inf"))
            p, keep, top, total = scored(q, k, off, top, total, factor, PRECISION)
        else:
            p, keep, top, total = scored_by(q, k, read, top, total, factor, PRECISION)
        v = tl.load(V + row * v_t + (n[:, None] * v_t + cv[None, :]), mask=within(some, cv, VW, BV), other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        at, readers = next_at, next_readers
    qp, qd = tl.load(QP + t, mask=inside, other=0), tl.load(QD + t, mask=inside, other=-2)
    for i in tl.range(0, parts * TILES, num_stages=1):
        entry = S * M - 1 - i // TILES
        begin = tl.load(AT + entry)
        row, seen = seen_by(
            PLACES, KP, KD, begin + i % TILES * BN, n, ends, qp, qd, left, right, begin + BLOCK, LEFT, RIGHT
        )
        seen = seen & read_by(tl.load(READERS + entry), m)[:, None]
        k = tl.load(K + row[:, None] * k_t + ck[None, :], mask=within(row >= 0, ck, KW, BK), other=0.0)
        p, keep, top, total = scored(q, k, tl.where(seen, 0.0, -float("inf")), top, total, factor, PRECISION)
        v = tl.load(V + row[:, None] * v_t + cv[None, :], mask=within(row >= 0, cv, VW, BV), other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, -float("inf"))
    o = O + b * o_b + t.to(tl.int64)[:, None] * o_t + head[:, None] * o_h + cv[None, :]
    tl.store(o, acc.to(O.dtype.element_ty), mask=within(inside, cv, VW, BV))
    tl.store(L + (b * H + head) * Tq + t, lse, mask=inside)


@triton.jit
def score_gradients(q, k, v, do, factor, lse, delta, PRECISION: tl.constexpr):
    """Gradients of the scores of a tile; lse is +∞ where nothing is read."""
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor - lse)
    return p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta)


@triton.jit(do_not_specialize=CHANGING)
def queries(
    Q, K, V, DO, L, DELTA, DQ, AT, READERS, COUNTS, PLACES, QP, QD, KP, KD,
    scale, left, right, first, Tq, S, ends, groups, chosen_heads,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, dq_b, dq_t, dq_h,
    KW: tl.constexpr, VW: tl.constexpr, H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BG: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `forward`. L, of which −∞ was made +∞, and DELTA ``[B, Tq, H]``."""
    group, heads = groups - 1 - tl.program_id(0), tl.cdiv(G, BG)
    part, bg = tl.program_id(1) % heads, tl.program_id(1) // heads
    b, g = (bg // (H // G)).to(tl.int64), bg % (H // G)
    r, n, ck, cv = tl.arange(0, M * BG), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    m, h, t = r // BG, part * BG + r % BG, first + group * M + r // BG
    inside, head, wide = (h < G) & (t < Tq), g * G + h, t.to(tl.int64)
    q = Q + b * q_b + wide[:, None] * q_t + head[:, None] * q_h + ck[None, :]
    q = tl.load(q, mask=within(inside, ck, KW, BK), other=0.0)
    do = DO + b * o_b + wide[:, None] * o_t + head[:, None] * o_h + cv[None, :]
    do = tl.load(do, mask=within(inside, cv, VW, BV), other=0.0)
    lse = tl.load(L + (b * Tq + wide) * H + head, mask=inside, other=float("inf")) * LOG2E
    delta = tl.load(DELTA + (b * Tq + wide) * H + head, mask=inside, other=0.0)[:, None]
    mine = (b * groups + group) * chosen_heads + g % chosen_heads
    AT += mine * S * M
    READERS += mine * S * M
    wholes, parts = tl.load(COUNTS + mine * 2), tl.load(COUNTS + mine * 2 + 1)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    TILES: tl.constexpr = (BLOCK + BN - 1) // BN
    factor = scale * LOG2E
    dq = tl.zeros((M * BG, BK), tl.float32)
    at, readers = tl.load(AT), tl.load(READERS)
    for i in range(0, wholes * TILES):
        following = tl.minimum(i + 1, wholes * TILES - 1) // TILES
        next_at, next_readers = tl.load(AT + following), tl.load(READERS + following)
        row, some = (at + i % TILES * BN).to(tl.int64), i % TILES * BN + n < BLOCK
        if BLOCK % BN == 0:
            some = n >= 0
        k = tl.load(K + row * k_t + (n[:, None] * k_t + ck[None, :]), mask=within(some, ck, KW, BK), other=0.0)
        v = tl.load(V + row * v_t + (n[:, None] * v_t + cv[None, :]), mask=within(some, cv, VW, BV), other=0.0)
        less = tl.where(read_by(readers, m), lse, float("inf"))[:, None]
        if BLOCK % BN:
            less = tl.where(some[None, :], less, float("inf"))
        ds = score_gradients(q, k, v, do, factor, less, delta, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        at, readers = next_at, next_readers
    qp, qd = tl.load(QP + t, mask=inside, other=0), tl.load(QD + t, mask=inside, other=-2)
    for i in tl.range(0, parts * TILES, num_stages=1):
        entry = S * M - 1 - i // TILES
        begin = tl.load(AT + entry)
        row, seen = seen_by(
            PLACES, KP, KD, begin + i % TILES * BN, n, ends, qp, qd, left, right, begin + BLOCK, LEFT, RIGHT
        )
        seen = seen & read_by(tl.load(READERS + entry), m)[:, None]
        k = tl.load(K + row[:, None] * k_t + ck[None, :], mask=within(row >= 0, ck, KW, BK), other=0.0)
        v = tl.load(V + row[:, None] * v_t + cv[None, :], mask=within(row >= 0, cv, VW, BV), other=0.0)
        less = tl.where(seen, lse[:, None], float("inf"))
        ds = score_gradients(q, k, v, do, factor, less, delta, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    into = DQ + b * dq_b + wide[:, None] * dq_t + head[:, None] * dq_h + ck[None, :]
    tl.store(into, (dq * scale).to(DQ.dtype.element_ty), mask=within(inside, ck, KW, BK))


@triton.jit
def piece_of(begin, end, piece, pieces, M: tl.constexpr):
    """The piece of a list that a program goes over."""
    each = tl.cdiv(tl.cdiv(end - begin, pieces), M) * M
    return tl.minimum(begin + piece * each, end), tl.minimum(begin + (piece + 1) * each, end)


@triton.jit
def of_queries(X, t, head, h, t_stride, h_stride, G: tl.constexpr, BG: tl.constexpr, W: tl.constexpr, B: tl.constexpr):
    """Rows of queries t and heads, `head`, which is number h of G."""
    columns = tl.arange(0, B)
    X += t.to(tl.int64)[:, None] * t_stride + (head[:, None] * h_stride + columns[None, :])
    if G % BG == 0 and W == B:
        return tl.load(X)
    return tl.load(X, mask=within(h < G, columns, W, B), other=0.0)


@triton.jit
def shares(dk, dv, k, v, q, do, factor, less, delta, PRECISION: tl.constexpr):
    """dk and dv with what queries add to them."""
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor - less)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit(do_not_specialize=CHANGING)
def keys(
    Q, K, V, DO, L, DELTA, DK, DV, QUERY, BEGIN, STARTS, PLACES, QP, QD, KP, KD,
    scale, left, right, Tq, ends, tiles, chosen_heads, pieces,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, dk_p, dk_b, dk_t, dk_h, dv_p, dv_b, dv_t, dv_h,
    KW: tl.constexpr, VW: tl.constexpr, H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BG: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PRECISION: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """DK, DV fp32 ``[pieces, B, Tk, Hk, ·]``, a piece of every list each. What is in the list of a tile begins in that
    tile, and reaches into as many behind it as a block has: their programs go over the list, too. Behind QUERY there
    is room for 2 · M more. MORE: what is in DK and DV counts."""
    tile, piece, bg = tl.program_id(0) // pieces, tl.program_id(0) % pieces, tl.program_id(1)
    b, g = (bg // (H // G)).to(tl.int64), bg % (H // G)
    r, n, ck, cv = tl.arange(0, M * BG), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    m, place = r // BG, tile * BN + n
    row = tl.load(PLACES + place, mask=place < ends, other=-1).to(tl.int64)
    k = K + b * k_b + g * k_h + row[:, None] * k_t + ck[None, :]
    k = tl.load(k, mask=within(row >= 0, ck, KW, BK), other=0.0)
    v = V + b * v_b + g * v_h + row[:, None] * v_t + cv[None, :]
    v = tl.load(v, mask=within(row >= 0, cv, VW, BV), other=0.0)
    Q += b * q_b
    DO += b * o_b
    L += b * Tq * H
    DELTA += b * Tq * H
    STARTS += (b * chosen_heads + g % chosen_heads) * tiles * 3
    factor = scale * LOG2E
    dk, dv = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BV), tl.float32)
    TILES: tl.constexpr = (BLOCK + BN - 1) // BN
    for part in range(0, (G + BG - 1) // BG):
        h = part * BG + r % BG
        head = g * G + h
        for back in range(0, tl.minimum(TILES, tile + 1)):
            begin, end = tl.load(STARTS + (tile - back) * 3), tl.load(STARTS + (tile - back) * 3 + 1)
            begin, end = piece_of(begin, begin + (end - begin) // M * M, piece, pieces, M)
            t = tl.load(QUERY + begin + m)
            for i in range(begin, end, M):
                following = tl.load(QUERY + i + M + m)
                q = of_queries(Q, t, head, h, q_t, q_h, G, BG, KW, BK)
                do = of_queries(DO, t, head, h, o_t, o_h, G, BG, VW, BV)
                lse, delta = tl.load(L + t * H + head) * LOG2E, tl.load(DELTA + t * H + head)
                if G % BG:
                    lse = tl.where(h < G, lse, float("inf"))
                dk, dv = shares(dk, dv, k, v, q, do, factor, lse[None, :], delta, PRECISION)
                t = following
    kp, kd = tl.load(KP + row, mask=row >= 0, other=0), tl.load(KD + row, mask=row >= 0, other=-3)
    for part in range(0, (G + BG - 1) // BG):
        h = part * BG + r % BG
        head = g * G + h
        for back in range(0, tl.minimum(TILES, tile) + 1):
            lists = STARTS + (tile - back) * 3
            begin, end = tl.load(lists), tl.load(lists + 1)
            begin = tl.where(back < TILES, begin + (end - begin) // M * M, tl.load(lists + 2))
            begin, end = piece_of(begin, tl.load(lists + 3), piece, pieces, M)
            for i in tl.range(begin, end, M, num_stages=1):
                there = i + m < end
                t = tl.load(QUERY + i + m, mask=there, other=0)
                q = of_queries(Q, t, head, h, q_t, q_h, G, BG, KW, BK)
                do = of_queries(DO, t, head, h, o_t, o_h, G, BG, VW, BV)
                there = there & (h < G)
                lse = tl.load(L + t * H + head, mask=there, other=float("inf")) * LOG2E
                delta = tl.load(DELTA + t * H + head, mask=there, other=0.0)
                apart = place[:, None] - tl.load(BEGIN + i + m, mask=there, other=0)[None, :]
                distance = kp[:, None] - tl.load(QP + t)[None, :]
                seen = (apart >= 0) & (apart < BLOCK) & (kd[:, None] == tl.load(QD + t)[None, :])
                if LEFT:
                    seen = seen & (distance >= -left)
                if RIGHT:
                    seen = seen & (distance <= right)
                less = tl.where(seen, lse[None, :], float("inf"))
                dk, dv = shares(dk, dv, k, v, q, do, factor, less, delta, PRECISION)
    DK += piece.to(tl.int64) * dk_p + b * dk_b + g * dk_h
    DV += piece.to(tl.int64) * dv_p + b * dv_b + g * dv_h
    DK += row[:, None] * dk_t + ck[None, :]
    DV += row[:, None] * dv_t + cv[None, :]
    dk, into, values = dk * scale, within(row >= 0, ck, KW, BK), within(row >= 0, cv, VW, BV)
    if MORE:
        dk, dv = dk + tl.load(DK, mask=into, other=0.0), dv + tl.load(DV, mask=values, other=0.0)
    tl.store(DK, dk, mask=into)
    tl.store(DV, dv, mask=values)
