"""Which strategy a call takes; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

from ...context import ShardedLayout
from ..geometry import Reach
from .schedule import LARGEST

BALANCE = 1800.0
"""FLOPs that a kernel does while a byte travels between two GPUs of a host: an H200's 650 TFLOP/s (cuDNN, 16,384
tokens, K = 128) over the 365 GB/s of its copy engines, both measured."""
CLEARLY = 0.9
"""Another way than the ring is taken for less than so much of its time."""
BYTES = 2
"""Of a number that travels; the balance is that of kernels on halves."""


def pick(
    strategy: str,
    heads: tuple[int, int],
    moved: tuple[int, int],
    layout: ShardedLayout,
    kv_layout: ShardedLayout,
    share: Callable[[], float],
    reach: Reach,
) -> str:
    """The strategy to use for so many query heads and heads of keys that travel, and so many numbers that a query has
    and half of those that travel of a key.

    Deterministic results need all keys in order. "auto" takes the two-dimensional mesh where there is one. Where GPUs
    copy from memory to memory it takes the ring, which hides its copies behind blocks, or Ulysses where every rank
    gets heads and it is clearly faster by `ring_time` and `ulysses_time`: of few tokens that all see each other, on
    many ranks. Else Ulysses where heads divide and it moves fewer bytes than a ring; else it gathers keys that are
    small beside the queries and that most ranks see; else the ring.

    Args:
        share: what a ring sends of all keys to all other ranks, asked where it decides.
    """
    cp = layout.cp
    if cp.deterministic:
        return "all_gather"
    if strategy != "auto" or cp.size == 1:
        return "ring" if strategy == "auto" else strategy
    if cp.axes is not None:
        return "usp"
    p, queries, keys = cp.size, layout.seq_len * moved[0], kv_layout.seq_len * moved[1]
    if cp.comm.copies:
        if heads[1] < p:
            return "ring"
        work = 4 * visible(layout, kv_layout, reach) * moved[0] / p / BALANCE
        most = -(-heads[1] // p) * p / heads[1]  # of the rank with most heads, over the mean
        by_heads = ulysses_time(p, work * most, queries * most, keys * most)
        return "ulysses" if by_heads < CLEARLY * ring_time(p, work, keys * share()) else "ring"
    by_ring = keys * share()
    if heads[1] % p == 0 and (queries + keys) / p < by_ring:
        return "ulysses"
    return "all_gather" if 4 * keys <= queries and 2 * by_ring > keys else "ring"


def visible(layout: ShardedLayout, kv_layout: ShardedLayout, reach: Reach) -> float:
    """Pairs of queries and keys that see each other, about: a band of each document."""
    total = 0.0
    for a, b, c, d in zip(layout.cu_seqlens, layout.cu_seqlens[1:], kv_layout.cu_seqlens, kv_layout.cu_seqlens[1:]):
        queries, keys = b - a, d - c
        back, ahead = (keys / 2 if side is None else min(side, keys / 2) for side in reach)
        total += queries * min(keys, back + ahead + 1)
    return total


def ring_time(p: int, work: float, sent: float) -> float:
    """What a copied ring takes on each of `p` ranks, in the time of a byte: its own block, then those of one owner, two
    and four, as far as their keys have come.

    Args:
        work: of a rank's kernels, in this time. sent: half of the numbers of keys and values that all other ranks see.
    """
    arrive, block = 2 * BYTES * sent / p, work / p
    now, come, left, n = block, 0.0, p - 1, 1
    while left:
        owners = min(n, left)
        come += owners * arrive
        now, left, n = max(now, come) + owners * block, left - owners, min(LARGEST, 2 * n)
    return now


def ulysses_time(p: int, work: float, queries: float, keys: float) -> float:
    """What Ulysses takes: its exchanges, there and back, hide behind nothing.

    Args:
        queries, keys: numbers of all queries, and half of those of all keys and values.
    """
    return work + 2 * BYTES * (queries + keys) / p * (p - 1) / p


def pick_for_chosen(strategy: str, layout: ShardedLayout, keys: int, each: int) -> str:
    """The strategy where queries choose `each` of `keys` keys.

    The ring where it copies from memory to memory, and no host waits. Else chosen keys alone, where a rank's queries
    together cannot choose half of all; else all are gathered: one call with all keys goes through a query's choices
    once, a ring once for every rank.
    """
    if strategy != "auto" or layout.cp.size == 1:
        return "all_gather" if strategy == "auto" else strategy
    if layout.cp.comm.copies:
        return "ring"
    return "chosen" if 2 * max(layout.lengths) * each <= keys else "all_gather"
