"""Who owns which segment where packed documents make unequal work: the segments are even in tokens, and spread over the
ranks so that causal attention within documents is even too, and few keys of others are seen.

More segments make more even work and more keys to send, so a few numbers of segments are tried. Of the splits whose
dearest rank has at most EVEN of the mean's work, that is taken whose dearest rank has the least of ``pairs + KEY · keys
received``; where there is none, the most even one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

PARTS = (2, 3, 4, 6, 8)
"""Segments a rank that are tried. Of 2, as many as in zigzag, the dearest rank has up to 1.7 times the mean's work."""
EVEN = 1.05
KEY = 300
"""Pairs of a query and a key, forward and backward, in the time that a key's gradient is under way, which nothing hides
at the end of a backward pass: 4 · K bytes a head at the 365 GB/s of an H200's copy engines, a pair's 14 · K FLOPs at
400 TFLOP/s. Keys and values themselves come while blocks are computed."""


def balanced(borders_of: Callable[[int], list[int]], offsets: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """Borders ``[n + 1]`` of segments, and the owner of each ``[n]``; as many segments for each rank.

    Args:
        borders_of: borders of so many segments that are even in tokens. offsets: of the documents.
    """
    tried = []
    for parts in PARTS:
        borders = borders_of(ranks * parts)
        before = pairs_before(borders, offsets)
        work = [b - a for a, b in zip(before, before[1:])]
        splits = [_by_work(work, ranks, parts)]
        if parts == 2:
            splits.insert(0, [*range(ranks), *reversed(range(ranks))])  # zigzag
        for owners in splits:
            pairs = [0] * ranks
            for owner, n in zip(owners, work):
                pairs[owner] += n
            received = keys_received(borders, owners, offsets, ranks)
            cost = max(n + KEY * keys for n, keys in zip(pairs, received))
            uneven = max(0.0, max(pairs) * ranks - EVEN * sum(pairs))
            tried.append(((uneven, cost), borders, owners))
    _, borders, owners = min(tried, key=lambda split: split[0])
    return borders, owners


def _by_work(work: Sequence[int], ranks: int, parts: int) -> list[int]:
    """The owner of each segment. Longest processing time first (Graham 1969): the dearest segment goes to the rank
    that has the least work so far."""
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    owners, owned = [0] * len(work), [0] * ranks
    for segment in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, rank = heappop(loads)
        owners[segment] = rank
        owned[rank] += 1
        if owned[rank] < parts:
            heappush(loads, (load + work[segment], rank))
    return owners


def keys_received(borders: Sequence[int], owners: Sequence[int], offsets: Sequence[int], ranks: int) -> list[int]:
    """How many keys of other ranks each rank's queries see, under causal attention within documents."""
    out = [0] * ranks
    cut = {bisect_right(offsets, b) - 1 for b in borders[1:-1] if b not in (0, offsets[-1])}
    for d in cut:
        start, stop = offsets[d], offsets[d + 1]
        own, last = [0] * ranks, [start] * ranks
        for i in range(bisect_right(borders, start) - 1, bisect_left(borders, stop)):
            a, b = max(start, borders[i]), min(stop, borders[i + 1])
            if a < b:
                own[owners[i]] += b - a
                last[owners[i]] = b
        for rank in range(ranks):
            out[rank] += last[rank] - start - own[rank]
    return out


def pairs_before(tokens: Sequence[int], offsets: Sequence[int]) -> list[int]:
    """For each of `tokens`, pairs of a query before it and a key which that query sees, under causal attention."""
    whole = [0, *accumulate(_triangle(b - a) for a, b in zip(offsets, offsets[1:]))]
    documents = (bisect_right(offsets, t) - 1 for t in tokens)
    return [whole[d] + _triangle(t - offsets[d]) for t, d in zip(tokens, documents)]


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
