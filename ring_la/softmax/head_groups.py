"""Ulysses in groups of heads (UPipe: Ghadia et al. 2026, arXiv 2602.21196): of one group at a time a rank has queries,
keys and values of the whole sequence.

    for each group of query heads, with the key heads they read
        heads for tokens, attention, tokens for heads

For the backward pass this rank's own tokens are kept, with all heads, and each group's heads travel once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..choices import HeadGroups
from .merging import wide
from .plan import AttentionMoves, Saved, recorded
from .tensors import Tensors


def cut_heads(heads: int, keys: int, groups: int) -> list[tuple[slice, slice]]:
    """Query heads in about so many groups, each with the key heads it reads: whole key heads with all their queries,
    or, where groups are more than these, an even share of one key head's queries."""
    ratio = heads // keys
    if groups <= keys:
        cuts = [keys * g // groups for g in range(groups + 1)]
        return [(slice(ratio * a, ratio * b), slice(a, b)) for a, b in zip(cuts, cuts[1:])]
    each = min(ratio, -(-groups // keys))
    cuts = [ratio * g // each for g in range(each + 1)]
    return [(slice(k * ratio + a, k * ratio + b), slice(k, k + 1)) for k in range(keys) for a, b in zip(cuts, cuts[1:])]


def count(asked: HeadGroups, keys: int, ranks: int) -> int:
    """How many groups; "auto": as many as leave every rank a key head of each."""
    if asked != "auto":
        return asked
    return keys // ranks if keys % ranks == 0 else 1


def of_heads(x: Tensors, queries: slice, keys: slice) -> Tensors:
    """What a call of these heads alone would be given."""
    by_query = [None if t is None else t[queries] for t in (x.sinks, x.up_k, x.up_v)]
    joint_k, joint_v = (None if t is None else t[:, :, keys] for t in (x.joint_k, x.joint_v))
    sinks, up_k, up_v = by_query
    return Tensors(x.q[:, :, queries], x.k[:, :, keys], x.v[:, :, keys], sinks, joint_k, joint_v, up_k, up_v)


@dataclass(frozen=True)
class HeadGroup:
    """Heads that are computed on together.

    Attributes:
        queries, keys: which heads. moves: a call of these alone.
    """

    queries: slice
    keys: slice
    moves: AttentionMoves

    def of(self, x: Tensors) -> Tensors:
        """The tensors of these heads."""
        return of_heads(x, self.queries, self.keys)

    def gradients(self, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Tensors:
        """Of the tensors of these heads, from what was saved and came of all."""
        o, lse = saved.o[:, :, self.queries], saved.lse[:, self.queries]
        mine = None if do is None else do[:, :, self.queries], None if dlse is None else dlse[:, self.queries]
        return self.moves.backward(self.moves.saved(self.of(saved.tensors), o, lse), *mine)

    def add(self, out: Tensors, gradients: Tensors) -> None:
        """Add theirs to those of all."""
        for room, gradient in zip(self.of(out), gradients):
            if room is not None and gradient is not None:
                room += gradient


@dataclass(frozen=True)
class GroupedMoves:
    """One call on one rank, but for its tensors, as `AttentionMoves` is.

    Attributes:
        groups: in the order they are computed in, the same on every rank. way_back: as in `AttentionMoves`.
    """

    groups: tuple[HeadGroup, ...]
    way_back: Callable[[], Callable[[], None]] | None = None

    def __call__(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """o and lse of this rank's queries, recorded for gradients."""
        return recorded(self, x)

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor, Saved]:
        """As `AttentionMoves.forward`; what to save are the arguments and the results."""
        B, T, H, _ = x.q.shape
        o = x.q.new_empty(B, T, H, x.value_width)
        lse = x.q.new_empty(B, H, T, dtype=wide(x.q.dtype))
        for group in self.groups:
            # what a group leaves has no name, so that it is gone before the next
            o[:, :, group.queries], lse[:, group.queries] = group.moves.forward(group.of(x))[:2]
        return o, lse, Saved(x, o, lse)

    def saved(self, x: Tensors, o: Tensor, lse: Tensor) -> Saved:
        """What `forward` saves, from its tensors and results."""
        return Saved(x, o, lse)

    def backward(self, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Tensors:
        """The gradients, in the inputs' dtypes. Key heads that several groups read have theirs added up wide."""
        x = saved.tensors
        shared = len(self.groups) > x.k.shape[2]
        out = Tensors(*(None if t is None else _zeros(t, shared) for t in x))
        for group in self.groups:
            group.add(out, group.gradients(saved, do, dlse))
        return Tensors(*(None if t is None else grad.to(t.dtype) for grad, t in zip(out, x)))


def _zeros(t: Tensor, sums: bool) -> Tensor:
    return torch.zeros(t.shape, dtype=wide(t.dtype) if sums else t.dtype, device=t.device)
