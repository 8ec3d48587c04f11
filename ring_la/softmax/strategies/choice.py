"""Which strategy a call takes; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...context import ShardedLayout
from ..geometry import Reach
from ..merging import wide
from ..tensors import Tensors
from .schedule import LARGEST

BALANCE = 1800.0
"""FLOPs that a kernel does while a byte travels between two GPUs of a host: an H200's 650 TFLOP/s (cuDNN, 16,384
tokens, K = 128) over the 365 GB/s of its copy engines, both measured."""
CLEARLY = 0.9
"""Another way than the ring is taken for less than so much of its time."""
BYTES = 2
"""Of a number that travels; the balance is that of kernels on halves."""
COPIED = 365e9
"""Bytes a second between two GPUs of a host, as in `BALANCE`."""
PASSED = 0.68e-9
"""Seconds that a round of a ring behind the first adds for each choice, in both passes: 2.33 s in three rounds beside
1.60 with all latents at hand, 262,144 queries of 2,048 choices, on four H200 (benchmarks/results/sparse-h200x4.json).
With blocks of keys it is more."""


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


class ChosenSizes(NamedTuple):
    """Of a call whose queries choose their keys; the same on every rank.

    Attributes:
        queries: of the rank that has most. choices: that one of them names, of all heads and batch rows.
        held: bytes that it takes in both passes: itself, its result, their gradients, its choice.
        keys: of the whole sequence. key, gradient: bytes of one that travels, and of its gradient on the way.
    """

    queries: float
    choices: float
    held: float
    keys: float
    key: float
    gradient: float

    @classmethod
    def of(cls, x: Tensors, layout: ShardedLayout, kv_layout: ShardedLayout) -> ChosenSizes:
        """Of a call's tensors."""
        assert x.chosen is not None
        choices = x.chosen.shape[0] * x.chosen.shape[2:].numel()
        of_query, half = (x.q.shape[0] * numbers for numbers in x.moved)
        of_result = x.q.shape[0] * x.q.shape[2] * x.value_width
        one = x.k.element_size()
        held = 2 * one * (of_query + of_result) + choices * x.chosen.element_size()
        gradient = 2 * half * wide(x.k.dtype).itemsize
        return cls(max(layout.lengths), choices, held, kv_layout.seq_len, 2 * half * one, gradient)

    def gathers(self, p: int, rounds: int) -> bool:
        """Whether p ranks gather all keys where they could copy them from memory to memory.

        It saves all rounds of a ring behind a rank's own keys. What is gathered, with its gradients, is to be no more
        than what a rank's queries hold: so memory goes with these, not with the sequence.
        """
        if self.keys * (self.key + self.gradient) > self.queries * self.held:
            return False
        moved = self.keys * (2 * self.key + self.gradient) * (p - 1) / p
        return moved / COPIED < rounds * self.queries * self.choices * PASSED


def pick_for_chosen(
    strategy: str, layout: ShardedLayout, sizes: ChosenSizes, block: int, rounds: Callable[[], int]
) -> str:
    """The strategy where queries choose keys, or `block` keys at once.

    One call with all keys goes through a query's choices once, a ring once for each round. So keys are gathered, but
    where GPUs copy from memory to memory and `ChosenSizes.gathers` has the ring, and where they do not and a rank's
    queries together cannot choose half of all: then these alone travel, and the host waits for how many.

    Args:
        rounds: that a copied ring has behind a rank's own keys, asked where it decides.
    """
    if strategy != "auto" or layout.cp.size == 1:
        return "all_gather" if strategy == "auto" else strategy
    if layout.cp.comm.copies:
        return "all_gather" if sizes.gathers(layout.cp.size, rounds()) else "ring"
    return "chosen" if 2 * sizes.queries * sizes.choices * block <= sizes.keys else "all_gather"
