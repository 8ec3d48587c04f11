"""The lightning indexer's choice in one pass: a score is put into its query's list where it is formed, if it may count.

`find` forms the scores of a tile of queries and keys, heads summed, and adds those above a query's `least`
(`best_kernel`) to its list; no scores are written down but those of the first keys. A query's place in its list is
taken by an atomic count, so lists have no order; what is chosen does not depend on it. Behind a launch lists that have
grown are cut (`trim`), so there is room for all that the next may add, whatever the scores.

Queries of few narrow heads (`FEW` bytes a tile) stay in shared memory while keys go by: of all heads a score is two
reads of its key's 64-row tile, and products wait for no memory. Of more heads a larger tile's queries are read again
for every tile of keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.runtime.launch import launch
from ..softmax.merging.parts import dense
from .best_kernel import LOWEST_SCORE, BestLists, ordered
from .chosen import CHUNK, Chosen, Rows

STAY: dict[str, Any] = dict(BM=64, BN=64, SPAN=32, num_warps=4, num_stages=3)
"""Queries and keys of a tile, and tiles of keys that a program goes through, where queries stay."""
PASS: dict[str, Any] = dict(BM=128, BN=128, SPAN=16, num_warps=8, num_stages=3)
"""The same where they do not."""
EXACT: dict[str, Any] = dict(BM=32, BN=32, SPAN=16, num_warps=4, num_stages=1)
"""Of numbers of 32 bits."""
FEW = 1 << 16
"""Bytes of a tile's queries up to which they stay: a multiprocessor has room for two such programs."""
SLOTS = 1 << 27
"""Of all lists that exist at once, 8 bytes each."""


@triton.jit(do_not_specialize=("n", "first", "end", "heads"))
def find(
    Q, K, W, SIZES, TOKENS, STARTS, KEYS, PLACES, COUNT, LEAST, n, first, end, heads, width,
    q_b, q_t, q_h, k_b, k_t, w_b, w_t, w_h, z_b,
    HEADS: tl.constexpr, SIZED: tl.constexpr, ALL: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of n queries ``[B, n]`` and of the keys from `first` to before `end` into lists of C.

    HEADS: how many, where queries stay; 0 where they do not. SIZED: a key's score is to be multiplied by its SIZES.
    ALL: every key has its slot, those that a query may not choose with −∞.
    """
    b = tl.program_id(2).to(tl.int64)
    rows, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    there = rows < n
    tokens = tl.load(TOKENS + rows, mask=there, other=-1).to(tl.int32)
    starts = tl.load(STARTS + rows, mask=there, other=2147483647).to(tl.int32)
    begin = first + tl.program_id(1) * (SPAN * BN)
    stop = tl.minimum(end, begin + SPAN * BN)
    if not ALL:
        stop, begin = tl.minimum(stop, tl.max(tokens, 0) + 1), tl.maximum(begin, tl.min(starts, 0))
    if begin >= stop:  # nobody may choose any of these
        return
    row = Q + b * q_b + rows[:, None].to(tl.int64) * q_t + d[None, :]
    of_row = W + b * w_b + rows.to(tl.int64) * w_t
    inside = there[:, None] & (d < width)[None, :]
    qs, ws = (), ()
    for h in tl.static_range(HEADS):  # pyright: ignore[reportGeneralTypeIssues]
        qs += (tl.load(row + h * q_h, mask=inside, other=0.0),)  # type: ignore[assignment]
        ws += (tl.load(of_row + h * w_h, mask=there, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    mine = b * n + rows
    least = tl.load(LEAST + mine, mask=there, other=2147483647)
    of_tile = (b * n + tl.program_id(0) * BM) * C
    KEYS += of_tile
    PLACES += of_tile
    lists = (tl.arange(0, BM) * C)[:, None]
    counts = COUNT + mine[:, None] + tl.zeros((BM, BN), tl.int32)
    for at in range(begin, stop, BN):
        keys = at + tl.arange(0, BN)
        k = K + b * k_b + keys[:, None].to(tl.int64) * k_t + d[None, :]
        k = tl.trans(tl.load(k, mask=(keys < stop)[:, None] & (d < width)[None, :], other=0.0))
        total = tl.zeros((BM, BN), tl.float32)
        for h in tl.static_range(HEADS):
            total += tl.maximum(tl.dot(qs[h], k, input_precision=PRECISION), 0.0) * ws[h][:, None]
        if HEADS == 0:
            for h in range(heads):
                q = tl.load(row + h * q_h, mask=inside, other=0.0)
                w = tl.load(of_row + h * w_h, mask=there, other=0.0).to(tl.float32)
                total += tl.maximum(tl.dot(q, k, input_precision=PRECISION), 0.0) * w[:, None]
        if SIZED:
            total *= tl.load(SIZES + b * z_b + keys, mask=keys < stop, other=0.0)[None, :]
        key = ordered(tl.where(total == 0.0, 0.0, total).to(tl.int32, bitcast=True))  # of two zeros neither is larger
        seen = (keys[None, :] <= tokens[:, None]) & (keys[None, :] >= starts[:, None]) & (keys < stop)[None, :]
        if ALL:
            new = there[:, None] & (keys < stop)[None, :]
            slot, key = lists + (keys - first)[None, :], tl.where(seen, key, LOWEST_SCORE)
        else:
            new = seen & (key > least[:, None])
            slot = lists + tl.atomic_add(counts, 1, mask=new, sem="relaxed")
        tl.store(KEYS + slot, key, mask=new)
        tl.store(PLACES + slot, tl.broadcast_to(keys[None, :], (BM, BN)), mask=new)


def choose(q: Tensor, k: Tensor, w: Tensor, rows: Rows, topk: int, sizes: Tensor | None = None) -> Chosen:
    """The `topk` best keys of each query.

    Args:
        q: ``[B, T, Hi, D]``. k: ``[B, Tk, D]``, of the whole sequence. w: ``[B, T, Hi]``.
        sizes: fp32 ``[B, Tk]``: what scores of a key are multiplied by.
    """
    q, k = dense(q), dense(k)
    (B, T), keys = q.shape[:2], k.shape[1]
    places = torch.empty(B, T, 1, topk, dtype=torch.int32, device=q.device)
    scores = torch.empty(places.shape, dtype=torch.float32, device=q.device)
    chunk = min(CHUNK, keys)
    lists: BestLists | None = None
    for strip in _strips(B, T, chunk, topk):
        if lists is None or len(lists.count) != B * (strip.stop - strip.start):
            lists = BestLists((B, strip.stop - strip.start, 1), topk, q.device, chunk)
        else:
            lists.clear()
        begin = rows.first_of(strip)
        for first in range(begin, int(rows.last[strip].max()) + 1, chunk):
            _find(
                q[:, strip], k, w[:, strip], sizes, rows, strip, first, min(first + chunk, keys), lists, first == begin
            )
            lists.trim(full=first == begin)
        lists.write(places[:, strip], scores[:, strip])
    return Chosen(places, scores)


def _strips(B: int, T: int, chunk: int, topk: int) -> list[slice]:
    """Queries whose lists exist at once."""
    room = chunk + 2 * max(16, int(triton.next_power_of_2(topk)))
    n = max(1, SLOTS // (B * room) // PASS["BM"]) * PASS["BM"]
    return [slice(a, min(a + n, T)) for a in range(0, T, n)]


def _find(
    q: Tensor, k: Tensor, w: Tensor, sizes: Tensor | None, rows: Rows, strip: slice, first: int, end: int,
    lists: BestLists, begins: bool,
) -> None:  # fmt: skip
    """Scores of some keys into the lists of some queries; of the first ones all, which needs no atomics."""
    if begins:
        lists.count.fill_(end - first)
    (B, n, heads, D), padded = q.shape, max(16, int(triton.next_power_of_2(q.shape[3])))
    stay = q.itemsize < 4 and heads * padded * q.itemsize * STAY["BM"] <= FEW
    tile = EXACT if q.itemsize == 4 else STAY if stay else PASS
    launch(
        find, (-(-n // tile["BM"]), -(-(end - first) // (tile["SPAN"] * tile["BN"])), B),
        q, k, w, lists.count if sizes is None else sizes, rows.tokens[strip], rows.starts[strip], lists.keys,
        lists.places, lists.count, lists.least, n, first, end, heads, D, *q.stride()[:3], *k.stride()[:2], *w.stride(),
        0 if sizes is None else sizes.stride(0), HEADS=heads if stay else 0, SIZED=sizes is not None, ALL=begins,
        C=lists.room, BD=padded, PRECISION="ieee" if q.itemsize == 4 else "tf32", **tile, tensors="any",
    )  # fmt: skip
