"""The best scores of each row, of scores that come some at a time: a list a row of what may still count.

A score goes into its row's list if it is above `least`, the row's topk-th best when the list was last cut. When a
list is full it is cut to the topk best, and `least` rises. Of scores in no particular order a row of m has some
topk · ln(m / topk) that ever go in, so nearly all are read once and left alone.

Scores are compared as ints that have the same order (`ordered`); of equal ones the first by place wins, whatever the
chunks they came in and whatever their order in the list.
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
"""The largest choice that a program sorts; larger ones PyTorch does."""
LOWEST = tl.constexpr(-2147483648)
LAST = tl.constexpr(2147483647)
LOWEST_SCORE = tl.constexpr(-2139095041)
"""−∞ as `ordered` has it."""


@triton.jit
def ordered(bits):
    """Bits of a float as an int32 that is larger where the float is; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def counted(KEYS, PLACES, count, key, place, ABOVE: tl.constexpr, BN: tl.constexpr):
    """How many of a list are at least `key`; or, without ABOVE, equal to it and before `place`."""
    n, found = tl.arange(0, BN), tl.zeros((BN,), tl.int32)
    for a in range(0, count, BN):
        there = a + n < count
        keys = tl.load(KEYS + a + n, mask=there, other=LOWEST)
        if ABOVE:
            found += (there & (keys >= key)).to(tl.int32)
        else:
            places = tl.load(PLACES + a + n, mask=there, other=LAST)
            found += (there & (keys == key) & (places < place)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def edge_of(KEYS, count, topk, R: tl.constexpr, BN: tl.constexpr):
    """A key that at least `topk` of a list reach, bit by bit: the topk-th best's, or the first that just so many do.
    Lists of up to R are read once."""
    least, above, step = tl.full((), LOWEST, tl.int64), topk + 1, 0
    if count <= R:
        j = tl.arange(0, R)
        keys = tl.load(KEYS + j, mask=j < count, other=LOWEST)
        while (step < 32) & (above != topk):
            trial = least + (tl.full((), 1, tl.int64) << (31 - step))
            found = tl.sum((keys >= trial.to(tl.int32)).to(tl.int32), 0)
            least, above = tl.where(found >= topk, trial, least), tl.where(found >= topk, found, above)
            step += 1
    else:
        while (step < 32) & (above != topk):
            trial = least + (tl.full((), 1, tl.int64) << (31 - step))
            found = counted(KEYS, KEYS, count, trial.to(tl.int32), 0, True, BN)
            least, above = tl.where(found >= topk, trial, least), tl.where(found >= topk, found, above)
            step += 1
    return least.to(tl.int32)


@triton.jit
def cut(KEYS, PLACES, count, topk, R: tl.constexpr, BN: tl.constexpr):
    """Leave a list's topk best. Returns a key that none of them is below and that none that comes later and counts
    equals; of those equal to it the first by place stay."""
    tl.debug_barrier()  # what other threads have written is there
    edge = edge_of(KEYS, count, topk, R, BN)
    equal = counted(KEYS, PLACES, count, edge, LAST, False, BN)
    wanted = topk - (counted(KEYS, PLACES, count, edge, 0, True, BN) - equal)
    last = tl.full((), LAST, tl.int32)
    if equal > wanted:
        last = tl.full((), 0, tl.int32)
        for step in range(31):
            trial = last + (tl.full((), 1, tl.int32) << (30 - step))
            last = tl.where(counted(KEYS, PLACES, count, edge, trial, False, BN) < wanted, trial, last)
    n, into = tl.arange(0, BN), 0
    for a in range(0, count, BN):
        there = a + n < count
        key = tl.load(KEYS + a + n, mask=there, other=LOWEST)
        place = tl.load(PLACES + a + n, mask=there, other=LAST)
        stays = there & ((key > edge) | ((key == edge) & (place <= last)))
        to = into + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all of it is read
        tl.store(KEYS + to, key, mask=stays)
        tl.store(PLACES + to, place, mask=stays)
        into += tl.sum(stays.to(tl.int32), 0)
    tl.debug_barrier()
    return edge


@triton.jit(do_not_specialize=("most", "topk"))
def trim(KEYS, PLACES, COUNT, LEAST, most, topk, C: tl.constexpr, R: tl.constexpr, BN: tl.constexpr):
    """Cut lists of more than `most`."""
    row = tl.program_id(0)
    count = tl.load(COUNT + row)
    if count > most:
        edge = cut(KEYS + row.to(tl.int64) * C, PLACES + row.to(tl.int64) * C, count, topk, R, BN)
        tl.store(COUNT + row, topk)
        tl.store(LEAST + row, edge)


@triton.jit(do_not_specialize=("T", "m", "first", "topk"))
def read(
    S, KEYS, PLACES, COUNT, LEAST, T, m, first, topk, heads, s_b, s_t, s_h,
    BN: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
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
                least = cut(KEYS, PLACES, count, topk, R, BN)
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
    BN: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The topk best of each list, the best first, into ``[B, T, heads, topk]``; −∞ and −1 where there are fewer."""
    row = tl.program_id(0)
    h, t, b = row % heads, (row // heads) % T, (row // heads // T).to(tl.int64)
    KEYS += row.to(tl.int64) * C
    PLACES += row.to(tl.int64) * C
    count = tl.load(COUNT + row)
    if count > topk:
        cut(KEYS, PLACES, count, topk, R, BN)
        count = topk
    j = tl.arange(0, K)
    key = tl.load(KEYS + j, mask=j < count, other=LOWEST).to(tl.int64)
    place = tl.load(PLACES + j, mask=j < count, other=0).to(tl.int64)
    both = tl.sort((key << 32) | (0x7FFFFFFF - place), descending=True)
    key, place = (both >> 32).to(tl.int32), (0x7FFFFFFF - (both & 0x7FFFFFFF)).to(tl.int32)
    score = ordered(key).to(tl.float32, bitcast=True)
    at = b * o_b + t.to(tl.int64) * o_t + h * topk + j
    there = (j < count) & (key > LOWEST_SCORE)
    tl.store(SCORES + at, tl.where(there, score, -float("inf")), mask=j < topk)
    tl.store(CHOSEN + at, tl.where(there, place, -1), mask=j < topk)


class BestLists:
    """The best of rows whose scores come chunk by chunk.

    Args:
        shape: ``[B, T, heads]`` of the rows. more: scores of a row that come between two cuts at most, where they are
            not read by `add`.

    Attributes:
        keys, places: int32 ``[B · T · heads, room]``: `ordered` scores and where they stand. count, least: int32, of
            each row.
    """

    def __init__(self, shape: torch.Size | tuple[int, int, int], topk: int, device: torch.device, more: int = 0):
        self._shape, self._topk, rows = shape, topk, shape[0] * shape[1] * shape[2]
        self._padded = max(16, int(triton.next_power_of_2(topk)))
        self.room = max(4 * self._padded, 2 * BLOCK) if not more else 2 * self._padded + more
        self.keys, self.places = torch.empty(2, rows, self.room, dtype=torch.int32, device=device)
        self.count, self.least = torch.empty(2, rows, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Nothing has come yet."""
        self.count.zero_()
        self.least.fill_(LOWEST_SCORE.value)

    def add(self, s: Tensor, first: int) -> None:
        """Scores ``[B, T, heads, m]`` of the keys from `first` on; −∞: not to be chosen."""
        s = s if s.stride(3) == 1 else s.contiguous()
        _, T, heads, m = s.shape
        launch(
            read, (len(self.count),), s, self.keys, self.places, self.count, self.least, T, m, first, self._topk,
            heads, *s.stride()[:3], BN=BLOCK, C=self.room, R=4 * self._padded, num_warps=4, tensors="any",
        )  # fmt: skip

    def trim(self, most: int | None = None, full: bool = False) -> None:
        """Cut lists of more than `most` to the best; None: of so many that what has come since makes a difference.

        Args:
            full: all lists are.
        """
        most = 3 * self._padded // 2 if most is None else most
        held = int(triton.next_power_of_2(self.room)) // 2 if full else 4 * self._padded
        launch(
            trim, (len(self.count),), self.keys, self.places, self.count, self.least, most, self._topk,
            C=self.room, R=held, BN=BLOCK, num_warps=8 if held > 8192 else 4, tensors="any",
        )  # fmt: skip

    def write(self, places: Tensor, scores: Tensor) -> None:
        """The best into places and scores ``[B, T, heads, topk]``, of the same strides, rows of heads side by side."""
        if self._topk > MOST:
            return self._write_sorted(places, scores)
        _, T, heads = self._shape
        launch(
            sort, (len(self.count),), self.keys, self.places, self.count, scores, places, T, self._topk, heads,
            *places.stride()[:2], BN=BLOCK, K=self._padded, C=self.room, R=4 * self._padded,
            num_warps=4 if self._padded <= 2048 else 8, tensors="any",
        )  # fmt: skip

    def _write_sorted(self, places: Tensor, scores: Tensor) -> None:
        """`write`, by PyTorch."""
        self.trim(self._topk)
        n = min(self._topk, self.room)
        there = torch.arange(n, device=self.count.device) < self.count[:, None]
        both = (self.keys[:, :n].long() << 32) | (0x7FFFFFFF - self.places[:, :n])
        both = both.masked_fill_(~there, torch.iinfo(torch.int64).min).sort(-1, descending=True).values
        key, shape = (both >> 32).int(), (*self._shape, n)
        there = key > LOWEST_SCORE.value
        found = (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)
        scores[..., :n] = found.masked_fill_(~there, -torch.inf).view(shape)
        places[..., :n] = (0x7FFFFFFF - (both & 0x7FFFFFFF)).int().masked_fill_(~there, -1).view(shape)
