"""The best scores of each row, of scores that come some at a time: a program a row and a list of what may still count.

A score goes into its row's list if it is above `least`, the row's topk-th best when the list was last cut. When a
list is full it is cut to the topk best, and `least` rises. Of scores in no particular order a row of m has some
topk · ln(m / topk) that ever go in, so nearly all are read once and left alone.

Scores are compared as ints that have the same order (`ordered`); of equal ones the first by place wins, whatever the
chunks they came in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.runtime.launch import launch

BLOCK = 1024
"""Scores that a program reads at once."""
MOST = 4096
"""The largest choice: lists of four times as many are cut in registers."""
LOWEST = tl.constexpr(-2147483648)


@triton.jit
def ordered(bits):
    """Bits of a float as an int32 that is larger where the float is; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def cut(KEYS, PLACES, count, topk, BN: tl.constexpr, C: tl.constexpr):
    """Leave a list's topk best, in their order: the topk-th best's key, found bit by bit."""
    tl.debug_barrier()  # what other threads have written is there
    j = tl.arange(0, C)
    keys = tl.load(KEYS + j, mask=j < count, other=LOWEST)
    least = tl.full((), LOWEST, tl.int64)
    for step in range(32):
        trial = least + (tl.full((), 1, tl.int64) << (31 - step))
        above = tl.sum((keys >= trial.to(tl.int32)).to(tl.int32), 0)
        least = tl.where(above >= topk, trial, least)
    edge = least.to(tl.int32)
    equals = topk - tl.sum((keys > edge).to(tl.int32), 0)  # of those at the edge, the first
    n, into, met = tl.arange(0, BN), 0, 0
    for a in range(0, count, BN):
        key = tl.load(KEYS + a + n, mask=a + n < count, other=LOWEST)
        place = tl.load(PLACES + a + n, mask=a + n < count, other=0)
        equal = ((key == edge) & (a + n < count)).to(tl.int32)
        stays = (key > edge) | ((equal > 0) & (met + tl.cumsum(equal, 0) <= equals))
        to = into + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all of it is read
        tl.store(KEYS + to, key, mask=stays)
        tl.store(PLACES + to, place, mask=stays)
        into += tl.sum(stays.to(tl.int32), 0)
        met += tl.sum(equal, 0)
    tl.debug_barrier()
    return edge


@triton.jit(do_not_specialize=("T", "m", "first", "topk"))
def read(
    S, KEYS, PLACES, COUNT, LEAST, T, m, first, topk, heads, s_b, s_t, s_h, BN: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Put scores ``[B, T, heads, m]`` of the keys from `first` on into lists ``[B · T · heads, C]``."""
    row = tl.program_id(0)
    h, t, b = row % heads, (row // heads) % T, (row // heads // T).to(tl.int64)
    S += b * s_b + t.to(tl.int64) * s_t + h * s_h
    KEYS += row.to(tl.int64) * C
    PLACES += row.to(tl.int64) * C
    count, least, n = tl.load(COUNT + row), tl.load(LEAST + row), tl.arange(0, BN)
    ahead = tl.load(S + n, mask=n < m, other=-float("inf"))
    for a in range(0, m, BN):
        s, next = ahead, a + BN + n
        ahead = tl.load(S + next, mask=next < m, other=-float("inf"))
        key = ordered(tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True))  # of two zeros neither is larger
        new = key > least
        found = tl.sum(new.to(tl.int32), 0)
        if found > 0:
            if count + found > C:
                least = cut(KEYS, PLACES, count, topk, BN, C)
                count = topk
                new = key > least
                found = tl.sum(new.to(tl.int32), 0)
            into = count + tl.cumsum(new.to(tl.int32), 0) - 1
            tl.store(KEYS + into, key, mask=new)
            tl.store(PLACES + into, first + a + n, mask=new)
            count += found
    tl.store(COUNT + row, count)
    tl.store(LEAST + row, least)


@triton.jit(do_not_specialize=("T", "topk"))
def sort(
    KEYS, PLACES, COUNT, SCORES, CHOSEN, T, topk, heads, o_b, o_t,
    BN: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The topk best of each list, the best first, into ``[B, T, heads, topk]``; −∞ and −1 where there are fewer."""
    row = tl.program_id(0)
    h, t, b = row % heads, (row // heads) % T, (row // heads // T).to(tl.int64)
    KEYS += row.to(tl.int64) * C
    PLACES += row.to(tl.int64) * C
    count = tl.load(COUNT + row)
    if count > topk:
        cut(KEYS, PLACES, count, topk, BN, C)
        count = topk
    j = tl.arange(0, K)
    key = tl.load(KEYS + j, mask=j < count, other=LOWEST).to(tl.int64)
    place = tl.load(PLACES + j, mask=j < count, other=0).to(tl.int64)
    both = tl.sort((key << 32) | (0x7FFFFFFF - place), descending=True)
    key, place = (both >> 32).to(tl.int32), (0x7FFFFFFF - (both & 0x7FFFFFFF)).to(tl.int32)
    score = ordered(key).to(tl.float32, bitcast=True)
    at = b * o_b + t.to(tl.int64) * o_t + h * topk + j
    tl.store(SCORES + at, tl.where(j < count, score, -float("inf")), mask=j < topk)
    tl.store(CHOSEN + at, tl.where(j < count, place, -1), mask=j < topk)


class BestLists:
    """The best of rows whose scores come chunk by chunk.

    Args:
        like: fp32 ``[B, T, heads, m]`` of the first chunk.
    """

    def __init__(self, like: Tensor, topk: int) -> None:
        self._shape, self._topk = like.shape[:3], topk
        rows, self._padded = like.shape[:3].numel(), max(16, int(triton.next_power_of_2(topk)))
        self._room = max(4 * self._padded, 2 * BLOCK)
        self._keys, self._places = like.new_empty(2, rows, self._room, dtype=torch.int32)
        self._count = like.new_zeros(rows, dtype=torch.int32)
        self._least = like.new_full((rows,), -torch.inf).view(torch.int32) ^ 0x7FFFFFFF

    def add(self, s: Tensor, first: int) -> None:
        """Scores ``[B, T, heads, m]`` of the keys from `first` on; −∞: not to be chosen."""
        s = s if s.stride(3) == 1 else s.contiguous()
        _, T, heads, m = s.shape
        launch(
            read, (len(self._count),), s, self._keys, self._places, self._count, self._least, T, m, first, self._topk,
            heads, *s.stride()[:3], BN=BLOCK, C=self._room, num_warps=4 if self._room <= 8192 else 8, tensors="any",
        )  # fmt: skip

    def write(self, places: Tensor, scores: Tensor) -> None:
        """The best into places and scores ``[B, T, heads, topk]``, of the same strides, rows of heads side by side."""
        _, T, heads = self._shape
        launch(
            sort, (len(self._count),), self._keys, self._places, self._count, scores, places, T, self._topk, heads,
            *places.stride()[:2], BN=BLOCK, K=self._padded, C=self._room, num_warps=4 if self._room <= 8192 else 8,
            tensors="any",
        )  # fmt: skip
