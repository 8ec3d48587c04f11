"""A call of softmax attention, checked, on one device or on a split sequence: where its tokens stand, how keys travel,
and which kernel computes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import wanting
from ..blockwise import exact_sum, fixed
from ..blockwise.sums import OF_TOKENS, part_of
from ..blockwise.switch import halves
from ..choices import LatentForm
from ..comm import Entry
from ..context import ShardedLayout
from ..errors import UnsupportedError
from .backends import Ask, AttentionBackend, cheaper_form, choose, choose_for_chosen
from .backends.canonical import Canonical
from .backends.triton import CanonicalTriton
from .geometry import Pair
from .geometry.placement import Joint, SplitPlacement, WholePlacement
from .head_groups import GroupedMoves, HeadGroup, count, cut_heads, of_heads
from .options import AttentionOptions
from .plan import AttentionMoves, Moves
from .scores import Scores
from .strategies import STRATEGIES, AttentionJob, Heads, HeadSplit, ring_of, share_sent
from .strategies.choice import ChosenSizes, pick, pick_for_chosen
from .strategies.schedule import most_rounds
from .tensors import Tensors


@dataclass
class KnownCalls:
    """What a layout remembers of the calls on it.

    Attributes:
        agreed: of calls that ranks have compared, the plans, and what `layout.again` takes.
        plans: of the operator's calls, which are compared apart from their plans.
        placements: how ranks meet, by strategy.
    """

    agreed: dict[Hashable, tuple[Moves, Entry | None]] = field(default_factory=dict)
    plans: dict[Hashable, Moves] = field(default_factory=dict)
    placements: dict[tuple[str, tuple | None], SplitPlacement] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: ShardedLayout) -> KnownCalls:
        """Of one layout, made when first asked for."""
        return layout.kept(cls, cls)

    def placement(self, strategy: str, layout: ShardedLayout, kv_layout: ShardedLayout) -> SplitPlacement:
        """How ranks meet under a strategy; made once."""
        name = strategy, None if kv_layout is layout else kv_layout.key
        if name not in self.placements:
            self.placements[name] = SplitPlacement.of(strategy, layout, kv_layout)
        return self.placements[name]


def _sum_over_tokens(layout: ShardedLayout, rows: Tensor, like: Tensor) -> Tensor:
    return part_of(exact_sum(rows, layout, OF_TOKENS), layout, like)


LEAST_BLOCK = 16
"""Keys that a choice may stand for, however few there are."""


def _within(scores: Scores, keys: int) -> Scores:
    """The same where a choice stands for more keys than there are: kernels go through all of a block. Not in a graph,
    which is for all lengths."""
    if scores.block <= LEAST_BLOCK or torch.compiler.is_compiling():
        return scores
    most = max(LEAST_BLOCK, 1 << (keys - 1).bit_length()) if keys else 1
    return scores if scores.block <= most else scores._replace(block=most)


class AttentionCall(NamedTuple):
    """Everything about one call but its differentiable tensors; the operator of one device takes the first five.

    Attributes:
        cu_seqlens: offsets of documents packed on one device.
        form: how queries meet latents; None: the cheaper way.
        layout, kv_layout: the splits of queries and keys; None: one device.
        strategy: how keys travel; kv_comm_dtype: in what.
    """

    scores: Scores
    joint: str
    backend: str | None
    cu_seqlens: Tensor | None = None
    form: LatentForm | None = None
    layout: ShardedLayout | None = None
    kv_layout: ShardedLayout | None = None
    strategy: str = "ring"
    kv_comm_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, x: Tensors, options: AttentionOptions, layout: ShardedLayout | None = None) -> AttentionCall:
        """Of checked keywords, whose scores are made here."""
        form = options.form if x.latent else None
        keys = None if layout is None else options.kv_layout or layout
        scores = _within(options.scores(x.q), x.k.shape[1] if keys is None else keys.seq_len)
        call = cls(scores, options.joint, options.backend, options.cu_seqlens, form)
        if layout is None:
            return call
        strategy = options.strategy or layout.cp.attention
        return call._replace(
            layout=layout, kv_layout=keys, strategy=strategy, kv_comm_dtype=options.kv_comm_dtype, cu_seqlens=None
        )

    def plan(self, x: Tensors) -> Moves:
        """Who holds what, how it travels, and which kernel computes it."""
        if self.layout is None:
            place: Any = WholePlacement.of(x.q.shape[1], x.k.shape[1], x.q.device, self.cu_seqlens)
            return self.planned(x, place, "ring")
        if x.chosen is None:
            heads, splits = (x.q.shape[2], x.k.shape[2]), (self.layout, self.kv_layout)
            name = pick(self.strategy, heads, x.moved, *splits, self._share_sent, self.scores.reach)
        else:
            sizes = ChosenSizes.of(x, self.layout, self.kv_layout)
            name = pick_for_chosen(self.strategy, self.layout, sizes, self.scores.block, self._rounds)
        place = KnownCalls.of(self.layout).placement(name, self.layout, self.kv_layout)
        return self.planned(x, place, name) if place.heads is None else self._grouped(x, place, name)

    def _grouped(self, x: Tensors, place: SplitPlacement, name: str) -> Moves:
        """The plan where heads travel, in the groups that were asked for."""
        (heads, keys), cp = (x.q.shape[2], x.k.shape[2]), self.layout.cp
        cut = cut_heads(heads, keys, count(cp.head_groups, keys, place.heads.size))
        if len(cut) == 1:
            return self.planned(x, place, name)
        calls = [self.planned(of_heads(x, q, k), place, name, q.start) for q, k in cut]
        groups = [HeadGroup(*of, moves) for of, moves in zip(cut, calls)]
        return GroupedMoves(tuple(groups), cp.comm.agreement.way_back)

    def _share_sent(self) -> float:
        """What a ring sends of all keys to all other ranks."""
        place = KnownCalls.of(self.layout).placement("ring", self.layout, self.kv_layout)
        return share_sent(place.rows, place.keys, self.scores.reach, place.ring)

    def _rounds(self) -> int:
        """Rounds that a copied ring has behind a rank's own keys."""
        place = KnownCalls.of(self.layout).placement("ring", self.layout, self.kv_layout)
        return most_rounds(place.rows, place.keys, self.scores.reach)

    def planned(self, x: Tensors, place: Any, name: str, first: int = 0) -> AttentionMoves:
        """The plan where it is known how ranks meet, of heads that are numbered from `first` on in the model."""
        heads, scores = self._heads(x, place), self.scores
        if heads is not None:
            scores = scores.of_heads(first + heads.query_numbers(x.q.device))
        joint = None if x.joint_k is None else place.joint(self.joint, x.joint_k.shape[1])
        gathered, order = place.all_keys if name in ("all_gather", "chosen") else (None, None)
        form = self._form(x, place)
        backend = self._backend(x, place, joint, form)
        job = AttentionJob(backend, scores, place.rows, place.keys, gathered, order, place.ring)
        if place.repeatable and form is None:
            strategy = STRATEGIES["canonical"]
        else:
            name = name if name in ("all_gather", "chosen") else "here" if job.group is None else "ring"
            strategy = ring_of(job) if name == "ring" else STRATEGIES[name]
        met = None if joint is None else Pair(joint.rows, joint.keys, scores.reach)
        way_back = None if self.layout is None else self.layout.cp.comm.agreement.way_back
        sums = partial(_sum_over_tokens, self.layout) if fixed(self.layout) else None
        return AttentionMoves(job, strategy, met, heads, form, self.kv_comm_dtype, way_back, sums)

    def _heads(self, x: Tensors, place: Any) -> Heads | None:
        if place.heads is None:
            return None
        members = place.holders[place.rank]
        tokens = {side: [o.lengths[r] for r in members] for side, o in (("q", self.layout), ("k", self.kv_layout))}
        split = HeadSplit(x.q.shape[2], x.k.shape[2], place.heads.size)
        return Heads(place.heads, split, tokens, dict(zip(("q", "k"), place.order)))

    def _form(self, x: Tensors, place: Any) -> LatentForm | None:
        """The same on every rank: it goes by the mean of their queries."""
        if not x.latent or self.form is not None:
            return self.form
        if x.chosen is not None:
            return "absorbed"
        return cheaper_form(place.length // len(place.rows), x.up_k, x.up_v)

    def _backend(self, x: Tensors, place: Any, joint: Joint | None, form: LatentForm | None) -> AttentionBackend:
        """The same on every rank: what is asked is the same."""
        windowed = self.scores.reach.windowed
        strides = place.strides | ({1} if windowed and joint is not None else set())
        facts: dict[str, Any] = dict(host_runs=place.known, strided_pairs=len(strides) > 1, packed=place.packed)
        facts |= dict(repeatable=place.repeatable, rows=place.length, block=self.scores.block)
        device, dtype, H, Hk, K, V = x.kind
        if form == "absorbed":
            Hk, K, V = 1, x.k.shape[3] + x.v.shape[3], x.k.shape[3]
        ask = Ask(device, dtype, H, Hk, K, V, self.scores.beyond, windowed, **facts)
        if x.chosen is not None:
            return choose_for_chosen(ask, self.backend)
        backend = choose(ask, self.backend)
        if backend.forward_only and wanting(*x.differentiable):
            raise UnsupportedError("backend", "a kernel with gradients, where these are wanted", repr(backend.name))
        if not place.repeatable:
            return backend
        by_kernels = halves(x.q) and not CanonicalTriton().unsupported(ask)
        return CanonicalTriton() if by_kernels else Canonical()
