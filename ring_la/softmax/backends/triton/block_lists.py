"""Device code that finds out which queries read which chosen blocks of keys, before anything is multiplied.

    breaks      at which places of the sequence the keys at hand are interrupted
    grouped     of some queries side by side the blocks that any of them reads, each once, and who reads it
    numbered    of each choice the tile of places where its block begins, and how it is read
    spelled     of choices sorted by that, whose they are

A block is *plain* where its keys are rows one after the other of one document: two looks at a running sum of breaks
say so, whatever way the sequence was split. A query reads a plain block *whole* where it sees all of its keys; such a
block needs no mask. Other blocks are looked up key by key where they are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHANGING = ("left", "right", "first", "n", "Tq", "S", "ends", "groups", "tiles", "count", "pieces", "last")
"""Arguments that change from call to call: no kernel is compiled anew for them."""
NOBODY = tl.constexpr(1 << 62)
"""Behind all entries of a list."""
PART = tl.constexpr(1 << 31)
"""Added to the place of a block of which a query sees a part."""


@triton.jit(do_not_specialize=("ends",))
def breaks(OUT, PLACES, KP, KD, ends, BN: tl.constexpr):
    """Whether a place neither goes on where the one before ends, nor is as empty as that."""
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = place < ends
    row = tl.load(PLACES + place, mask=inside, other=-1)
    before = tl.load(PLACES + place - 1, mask=inside & (place > 0), other=-1)
    here, both = row >= 0, (row > 0) & (row == before + 1)
    same = tl.load(KD + row, mask=both, other=0) == tl.load(KD + before, mask=both, other=0)
    same = same & (tl.load(KP + row, mask=both, other=0) == tl.load(KP + before, mask=both, other=0) + 1)
    on = tl.where(here, both & same, before < 0)
    tl.store(OUT + place, (~on).to(tl.int32), mask=inside)


@triton.jit
def found(
    c, there, qp, qd, PLACES, RUNS, KP, KD, ends, left, right,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(row of the first key of a block at places c, whether any of it may be seen, whether it is read whole)."""
    there = there & (c >= 0) & (c < ends)
    inside = there & (c + BLOCK <= ends)
    row = tl.load(PLACES + c, mask=there, other=-1)
    run = tl.load(RUNS + c, mask=inside, other=-1)
    inside = inside & (run == tl.load(RUNS + c + BLOCK - 1, mask=inside, other=-2))
    plain = inside & (row >= 0)
    nearest = tl.load(KP + row, mask=plain, other=0) - qp
    same = plain & (tl.load(KD + row, mask=plain, other=-3) == qd)
    seen, whole = same, same
    if LEFT:
        seen = seen & (nearest + BLOCK - 1 >= -left)
        whole = whole & (nearest >= -left)
    if RIGHT:
        seen = seen & (nearest <= right)
        whole = whole & (nearest + BLOCK - 1 <= right)
    return row, tl.where(inside, seen, there), whole


@triton.jit
def united(e0, b0, e1, b1):
    """Who reads an entry, of two stretches of a sorted list, the one nearer to where the scan ends last."""
    return e1, tl.where(e0 == e1, b0 | b1, b1)


@triton.jit(do_not_specialize=CHANGING)
def grouped(
    AT, READERS, COUNTS, CHOSEN, PLACES, RUNS, QP, QD, KP, KD, left, right, first, Tq, S, ends, groups, heads,
    c_b, c_t, c_h,
    M: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Lists of M queries ``[B, groups, heads, S · M]``, as AT and, a bit a query, READERS: in front the rows of blocks
    that are read whole, from the end on the places of others. COUNTS ``[B, groups, heads, 2]`` of both. Blocks are
    united among BS choices of each query; what a query chooses twice is an entry more."""
    group, h, b = tl.program_id(0), tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    n = tl.arange(0, M * BS)
    t = first + group * M + n % M
    qp, qd = tl.load(QP + t, mask=t < Tq, other=0), tl.load(QD + t, mask=t < Tq, other=-2)
    CHOSEN += b * c_b + t.to(tl.int64) * c_t + h * c_h
    mine = (b * groups + group) * heads + h
    AT += mine * S * M
    READERS += mine * S * M
    wholes = 0
    parts = 0
    for begin in range(0, S, BS):
        slot = begin + n // M
        there = (t < Tq) & (slot < S)
        c = tl.load(CHOSEN + slot, mask=there, other=-1).to(tl.int32)
        row, seen, whole = found(c, there, qp, qd, PLACES, RUNS, KP, KD, ends, left, right, BLOCK, LEFT, RIGHT)
        entry = tl.where(whole, row.to(tl.int64), c.to(tl.int64) + PART)
        sorted = tl.sort(tl.where(seen, entry * M + n % M, NOBODY))
        some, before = sorted < NOBODY, tl.gather(sorted, tl.maximum(n - 1, 0), 0)
        twice, bit = (n > 0) & (before == sorted), tl.full((M * BS,), 1, tl.int64) << (sorted % M)
        entry, readers = tl.associative_scan((sorted // M, tl.where(twice, 0, bit)), 0, united, reverse=True)
        listed = some & (twice | (n == 0) | (entry != before // M))
        front, back = (listed & (entry < PART)).to(tl.int32), (listed & (entry >= PART)).to(tl.int32)
        at = tl.where(front > 0, wholes + tl.cumsum(front, 0) - 1, S * M - parts - tl.cumsum(back, 0))
        tl.store(AT + at, (entry % PART).to(tl.int32), mask=listed)
        tl.store(READERS + at, tl.where(twice, bit, readers), mask=listed)
        wholes += tl.sum(front, 0)
        parts += tl.sum(back, 0)
    tl.store(COUNTS + mine * 2, wholes)
    tl.store(COUNTS + mine * 2 + 1, parts)


@triton.jit(do_not_specialize=CHANGING)
def numbered(
    OUT, CHOSEN, PLACES, RUNS, QP, QD, KP, KD, left, right, first, n, S, ends, tiles, heads, last, c_b, c_t, c_h,
    BP: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """OUT ``[B, n, heads, S]``: ``3 · (tile of head h of row b) + kind`` of the choices of n queries from `first` on.
    Kinds: 0 read whole, from the tile's first place on; 1 a part of such a block; 2 a block that begins inside a tile.
    `last`: nothing is read."""
    slot, b = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP), tl.program_id(1).to(tl.int64)
    there, each = slot < n.to(tl.int64) * heads * S, heads * S
    t, h = first + (slot // each).to(tl.int32), slot // S % heads
    c = tl.load(CHOSEN + b * c_b + t.to(tl.int64) * c_t + h * c_h + slot % S, mask=there, other=-1).to(tl.int32)
    qp, qd = tl.load(QP + t, mask=there, other=0), tl.load(QD + t, mask=there, other=-2)
    _, seen, whole = found(c, there, qp, qd, PLACES, RUNS, KP, KD, ends, left, right, BLOCK, LEFT, RIGHT)
    kind = tl.where((c % BN != 0) | (BLOCK % BN != 0), 2, tl.where(whole, 0, 1))
    number = ((b * heads + h) * tiles + c // BN) * 3 + kind
    tl.store(OUT + b * n.to(tl.int64) * each + slot, tl.where(seen, number, last).to(tl.int32), mask=there)


@triton.jit(do_not_specialize=CHANGING)
def spelled(QUERY, BEGIN, ORDER, CHOSEN, first, n, S, count, heads, c_b, c_t, c_h, BP: tl.constexpr):
    """Query and first place of each of the sorted choices, which ORDER counts as `numbered` has them."""
    at = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    slot = tl.load(ORDER + at, mask=at < count, other=0)
    row, h = slot // (heads * S), slot // S % heads
    b, t = row // n, first + row % n
    c = tl.load(CHOSEN + b * c_b + t * c_t + h * c_h + slot % S, mask=at < count, other=-1)
    tl.store(QUERY + at, t.to(tl.int32), mask=at < count)
    tl.store(BEGIN + at, c.to(tl.int32), mask=at < count)
