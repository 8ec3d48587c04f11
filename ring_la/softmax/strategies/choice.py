"""Which strategy a call takes; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

from ...context import ShardedLayout


def pick(
    strategy: str,
    heads: tuple[int, int],
    moved: tuple[int, int],
    layout: ShardedLayout,
    kv_layout: ShardedLayout,
    share: Callable[[], float],
) -> str:
    """The strategy to use for so many query heads and heads of keys that travel, and so many numbers that a query has
    and half of those that travel of a key.

    Deterministic results need all keys in order. "auto" takes the two-dimensional mesh where there is one; the ring
    where it copies from memory to memory (measured ahead of the others on 4 GPUs, long and short); else Ulysses where
    heads divide and it moves fewer bytes than a ring; else it gathers keys that are small beside the queries and that
    most ranks see; else the ring, which hides its messages behind blocks.

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
    if cp.comm.copies:
        return "ring"
    p, queries, keys = cp.size, layout.seq_len * moved[0], kv_layout.seq_len * moved[1]
    by_ring = keys * share()
    if heads[1] % p == 0 and (queries + keys) / p < by_ring:
        return "ulysses"
    return "all_gather" if 4 * keys <= queries and 2 * by_ring > keys else "ring"


def pick_for_chosen(strategy: str, layout: ShardedLayout) -> str:
    """The strategy where queries choose their keys: a gather, unless keys are copied from memory to memory. One call
    with all keys goes through a query's choices once, a ring once for every rank."""
    if strategy != "auto":
        return strategy
    return "ring" if layout.cp.comm.copies else "all_gather"
