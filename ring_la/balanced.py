"""Who owns which segment where packed documents make unequal work: the segments are even in tokens, and spread over the
ranks so that causal attention within documents is even too, and few keys of others are seen.

More segments make more even work and more keys to send, so a few numbers of segments are tried. Of the splits whose
dearest rank has at most EVEN of the mean's work, that is taken whose dearest rank has the least of ``pairs + KEY · keys
received``; where there is none, the most even one. Segments are dealt by work, and by work and the keys that a rank
then still has to receive: who has a document's later tokens takes its earlier ones at less. Under a window all tokens
see as many keys, but for the first of a document: a zigzag whose first segments share those out is tried, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

PARTS = (2, 3, 4, 6, 8)
"""Segments a rank that are tried. Of 2, as many as in zigzag, the dearest rank has up to 1.7 times the mean's work."""
EVEN = 1.05
KEY = 300
"""Pairs of a query and a key, forward and backward, in the time that a key's gradient is under way, which nothing hides
at the end of a backward pass: 4 · K bytes a head at the 365 GB/s of an H200's copy engines, a pair's 14 · K FLOPs at
400 TFLOP/s. Keys and values themselves come while blocks are computed."""


def balanced(
    borders_of: Callable[[int], list[int]],
    offsets: Sequence[int],
    ranks: int,
    window: int | None = None,
    unit: int | None = None,
) -> tuple[list[int], list[int]]:
    """Borders ``[n + 1]`` of segments, and the owner of each ``[n]``; as many segments for each rank.

    Args:
        borders_of: borders of so many segments that are even in tokens. offsets: of the documents.
        window: earlier keys that a query sees; None: all of its document.
        unit: borders may fall on any multiple of it; None: on those of `borders_of` alone.
    """
    tried = []
    for borders, owners in _splits(borders_of, offsets, ranks, window, unit):
        before = pairs_before(borders, offsets, window)
        pairs = [0] * ranks
        for owner, a, b in zip(owners, before, before[1:]):
            pairs[owner] += b - a
        received = keys_received(borders, owners, offsets, ranks, window)
        cost = max(n + KEY * keys for n, keys in zip(pairs, received))
        uneven = max(0.0, max(pairs) * ranks - EVEN * sum(pairs))
        tried.append(((uneven, cost), borders, owners))
    _, borders, owners = min(tried, key=lambda split: split[0])
    return borders, owners


def _splits(
    borders_of: Callable[[int], list[int]], offsets: Sequence[int], ranks: int, window: int | None, unit: int | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Borders and owners to choose from."""
    zigzag = [*range(ranks), *reversed(range(ranks))]
    for parts in PARTS:
        borders = borders_of(ranks * parts)
        if parts == 2:
            yield borders, zigzag
        before = pairs_before(borders, offsets, window)
        work = [b - a for a, b in zip(before, before[1:])]
        yield borders, _by_work(work, ranks, parts)
        if window is None:
            yield borders, _by_work_and_keys(work, _pieces(borders, offsets), ranks, parts)
    if window is not None and unit is not None and len(offsets) == 2:
        borders = _short_heads(borders_of(ranks), window, unit)
        if borders is not None:
            yield borders, zigzag


def _short_heads(shares: Sequence[int], window: int, unit: int) -> list[int] | None:
    """Borders of a zigzag of one document whose first segments have even parts of what its first tokens see less than
    a window, and whose last segments have the rest of the ranks' tokens; None where a rank's share is shorter.

    With W = window + 1, the tokens before x miss x W − x² / 2 pairs of x W, and all W² / 2: a share r / P of these is
    missed before x = W (1 − √(1 − r / P)).
    """
    P, full = len(shares) - 1, window + 1
    heads = [unit * round(full * (1 - (1 - r / P) ** 0.5) / unit) for r in range(P + 1)]
    tokens = [b - a for a, b in zip(shares, shares[1:])][::-1]  # the last share, maybe a shorter one, is rank 0's
    tails = [n - (b - a) for n, a, b in zip(tokens, heads, heads[1:])]
    if min(tails) < 0:
        return None
    return heads + [heads[-1] + n for n in accumulate(reversed(tails))]


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


def _by_work_and_keys(
    work: Sequence[int], pieces: Sequence[Sequence[tuple[int, int, int]]], ranks: int, parts: int
) -> list[int]:
    """The same, where a rank's work so far includes KEY for each key that it receives."""
    costs, owners, owned = [0] * ranks, [0] * len(work), [0] * ranks
    held: dict[tuple[int, int], tuple[int, int, int]] = {}  # rank, document: its last piece's start, tokens, received
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        best, owner = 0, -1
        for rank in range(ranks):
            if owned[rank] < parts:
                cost = costs[rank] + work[i]
                for document, a, b in pieces[i]:
                    last, tokens, received = held.get((rank, document), (-1, 0, 0))
                    cost += KEY * (a - tokens - received if a > last else a - b)
                if owner < 0 or cost < best:
                    best, owner = cost, rank
        owners[i], costs[owner] = owner, best
        owned[owner] += 1
        for document, a, b in pieces[i]:
            last, tokens, received = held.get((owner, document), (-1, 0, 0))
            received = a - tokens if a > last else received - (b - a)
            held[owner, document] = max(a, last), tokens + b - a, received
    return owners


def _pieces(borders: Sequence[int], offsets: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Of each segment, the documents that others have tokens of, too, each with its first token there and the one
    behind the last."""
    out: list[list[tuple[int, int, int]]] = [[] for _ in borders[1:]]
    for d in {bisect_right(offsets, b) - 1 for b in borders[1:-1] if b not in (0, offsets[-1])}:
        first, last = offsets[d], offsets[d + 1]
        for i in range(bisect_right(borders, first) - 1, bisect_left(borders, last)):
            a, b = max(first, borders[i]), min(last, borders[i + 1])
            if a < b:
                out[i].append((d, a - first, b - first))
    return out


def keys_received(
    borders: Sequence[int], owners: Sequence[int], offsets: Sequence[int], ranks: int, window: int | None = None
) -> list[int]:
    """How many keys of other ranks each rank's queries see, under causal attention within documents."""
    out = [0] * ranks
    cut = {bisect_right(offsets, b) - 1 for b in borders[1:-1] if b not in (0, offsets[-1])}
    for d in cut:
        start, stop = offsets[d], offsets[d + 1]
        last = [start] * ranks
        for i in range(bisect_right(borders, start) - 1, bisect_left(borders, stop)):
            a, b = max(start, borders[i]), min(stop, borders[i + 1])
            if a < b:
                first = start if window is None else max(start, a - window)
                out[owners[i]] += max(0, a - max(first, last[owners[i]]))
                last[owners[i]] = b
    return out


def pairs_before(tokens: Sequence[int], offsets: Sequence[int], window: int | None = None) -> list[int]:
    """For each of `tokens`, pairs of a query before it and a key which that query sees, under causal attention."""
    whole = [0, *accumulate(_seen(b - a, window) for a, b in zip(offsets, offsets[1:]))]
    documents = (bisect_right(offsets, t) - 1 for t in tokens)
    return [whole[d] + _seen(t - offsets[d], window) for t, d in zip(tokens, documents)]


def _seen(length: int, window: int | None) -> int:
    """Pairs of the first queries of a document."""
    rising = length if window is None else min(length, window + 1)
    return rising * (rising + 1) // 2 + (length - rising) * rising
