"""Softmax attention on a split sequence: its plan from a layout."""

from __future__ import annotations

from dataclasses import dataclass

from ..context import ShardedLayout
from .backends import Ask, Backend, choose
from .backends.canonical import Canonical
from .core import Plan, Tensors
from .placement import Placement
from .scores import Scores
from .strategies import STRATEGIES, Heads, HeadSplit, Job


@dataclass(frozen=True)
class ShardedCall:
    """Everything about one call on a split sequence but its differentiable tensors."""

    layout: ShardedLayout
    kv_layout: ShardedLayout
    scores: Scores
    joint: str
    strategy: str
    backend: str | None

    def plan(self, x: Tensors) -> Plan:
        """Who holds what, how it travels, and which kernel computes it."""
        name = pick(self.strategy, x, self.layout, self.kv_layout)
        place, scores = Placement.kept(name, self.layout, self.kv_layout), self.scores
        heads = self._heads(place, x)
        if heads is not None:
            scores = scores.of_heads(heads.query_numbers(x.q.device))
        joint_rows = joint_keys = None
        whole = {}
        if x.joint_k is not None:
            joint_rows, joint_keys, all_rows = place.joint(self.joint, x.joint_k.shape[1])
            whole[joint_rows] = all_rows
        backend = self._backend(place, x)
        gathered, order = place.all_keys if name == "all_gather" else (None, None)
        if self.layout.cp.deterministic:
            rows = place.rows[place.rank]
            backend = Canonical({rows: place.whole_rows} | {r: w for r, w in whole.items() if r is not rows})
        job = Job(backend, scores, place.rows, place.keys, gathered, order, place.ring)
        way = "all_gather" if name == "all_gather" else "copied" if place.ring and place.ring.copies else "ring"
        return Plan(job, STRATEGIES[way], joint_rows, joint_keys, heads)

    def _heads(self, place: Placement, x: Tensors) -> Heads | None:
        if place.heads is None:
            return None
        members = place.holders[place.rank]
        tokens = {
            side: [layout.lengths[r] for r in members] for side, layout in (("q", self.layout), ("k", self.kv_layout))
        }
        split = HeadSplit(x.q.shape[2], x.k.shape[2], place.heads.size)
        return Heads(place.heads, split, tokens, dict(zip(("q", "k"), place.order)))

    def _backend(self, place: Placement, x: Tensors) -> Backend:
        """The same on every rank: what is asked is the same."""
        strides = place.strides | ({1} if self.scores.windowed and x.joint_k is not None else set())
        shapes = (x.q.shape[2], x.k.shape[2], x.q.shape[3], x.v.shape[3])
        how = dict(strided_pairs=len(strides) > 1, packed=self.layout.num_documents > 1)
        how |= dict(repeatable=self.layout.cp.deterministic, rows=self.layout.seq_len)
        return choose(Ask(x.q.device, x.q.dtype, *shapes, self.scores, **how), self.backend)


def pick(strategy: str, x: Tensors, layout: ShardedLayout, kv_layout: ShardedLayout) -> str:
    """The strategy to use; the same on every rank.

    Deterministic results need all keys in order. "auto" takes the two-dimensional mesh where there is one; the ring
    where it copies from memory to memory (measured ahead of the others on 4 GPUs, long and short); else Ulysses where
    heads divide and it moves fewer bytes than a ring; else it gathers keys that are small beside the queries; else the
    ring, which hides its messages behind blocks.
    """
    cp = layout.cp
    if cp.deterministic:
        return "all_gather"
    if strategy != "auto" or cp.size == 1:
        return "ring" if strategy == "auto" else strategy
    if cp.grid is not None:
        return "usp"
    if cp.comm.copies:
        return "ring"
    (H, K), (Hk, V), p = x.q.shape[2:], x.v.shape[2:], cp.size
    queries, keys = layout.seq_len * H * (K + V), kv_layout.seq_len * Hk * (K + V)
    if Hk % p == 0 and (queries + keys) / p < keys:
        return "ulysses"
    return "all_gather" if 4 * keys <= queries else "ring"
