"""A sequence in rounds: run after run of tokens, each split over all ranks, states handed from one to the next.

The activations that exist at a time are those of one round, whatever the length of the sequence; what stays of the
others is what `recompute` keeps. Gradients flow through the states, so loss and gradients are those of the whole
sequence. For models whose every layer is a recurrence: the state of softmax attention is all its keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import is_int
from ..context import ContextParallel, ShardedLayout
from ..errors import ArgumentError, UnsupportedError, describe_tensor
from ..layout import check_cu_seqlens
from ..nn import KVCache, MixtureOfExperts
from .loss import IGNORE


@dataclass(frozen=True)
class SequenceRound:
    """One run of tokens of a sequence.

    Attributes:
        layout: how it is split.
        ids, targets: this rank's tokens of it ``[1, T_local]``, and the token that follows each.
        total: the targets of the whole sequence.
        continues: whether its first document began in an earlier round. last: whether it ends the sequence.
    """

    layout: ShardedLayout
    ids: Tensor
    targets: Tensor
    total: int
    continues: bool
    last: bool

    def entering(self, states: Sequence[Any]) -> list[Any]:
        """What the layers start from, given what they remember of the round before."""
        documents, ranks = self.layout.num_documents, self.layout.cp.size
        return [carried(state, self.continues, documents, ranks) for state in states]


def in_rounds(
    ids: Tensor, cp: ContextParallel, rounds: int, cu_seqlens: Tensor | Sequence[int] | None
) -> Iterator[SequenceRound]:
    """The rounds of a sequence ``[1, T]``, one after the other; see `HybridLM.loss_in_rounds`."""
    cu = _check(ids, cp, rounds, cu_seqlens)
    T = ids.shape[1]
    ends = torch.zeros(T, dtype=torch.bool, device="cpu")
    ends[torch.tensor([c - 1 for c in cu[1:] if c > 0], device="cpu")] = True
    targets = ids.roll(-1, 1).masked_fill(ends.to(ids.device), IGNORE).long()
    total = max(1, T - int(ends.sum()))
    borders = [T * i // rounds for i in range(rounds + 1)]

    def one(start: int, stop: int) -> SequenceRound:
        inside = [start, *cu[bisect_right(cu, start) : bisect_left(cu, stop)], stop]
        layout = cp.layout(stop - start, cu_seqlens=[c - start for c in inside] if cu_seqlens is not None else None)
        mine, following = (layout.shard(x[:, start:stop]) for x in (ids, targets))
        return SequenceRound(layout, mine, following, total, start not in cu, stop == T)

    return map(one, borders, borders[1:])


def _check(ids: Tensor, cp: ContextParallel, rounds: int, cu_seqlens: Tensor | Sequence[int] | None) -> tuple[int, ...]:
    """Refuse what does not fit; the documents' offsets."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
        raise ArgumentError("ids", "an int tensor [1, T]", describe_tensor(ids))
    if not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel", type(cp).__name__)
    T = ids.shape[1]
    if not is_int(rounds, 1) or rounds > T:
        raise ArgumentError("rounds", f"an int from 1 to {T}", repr(rounds))
    return (0, T) if cu_seqlens is None else check_cu_seqlens(cu_seqlens, T)


def refuse_growing(blocks: Iterable[tuple[str, Any]]) -> None:
    """Refuse blocks, each with its layer's name, whose state grows with the sequence or whose router is balanced over
    the whole of it."""
    for name, block in blocks:
        if block.layer.state_type is KVCache:
            raise UnsupportedError("rounds", "recurrent layers alone", f"a layer of kind {name!r}")
        if isinstance(block.mlp, MixtureOfExperts) and (block.mlp.balance_coef or block.mlp.z_coef):
            got = "auxiliary losses, which are of the whole sequence"
            raise UnsupportedError("rounds", "no auxiliary losses", got, "Set balance_coef and z_coef to 0")


def carried(state: Any, continues: bool, documents: int, ranks: int) -> Any:
    """What the first of `documents` documents starts from: the last one's state where it goes on; the others: nothing.

    `state` is a NamedTuple of tensors with one row a document, or None. The gradient of an entering state is the whole
    one on each of the `ranks`, and gradients of a leaving state are summed over them: each passes on its share.
    """

    def rows(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        first = _shared(x[-1:], ranks) if continues else torch.zeros_like(x[-1:])
        return torch.cat([first, x.new_zeros(documents - 1, *x.shape[1:])]) if documents > 1 else first

    return type(state)(*map(rows, state))


def _shared(x: Tensor, ranks: int) -> Tensor:
    """`x`, whose gradient is divided by `ranks`."""
    if x.requires_grad and ranks > 1:
        x = x.view_as(x)
        x.register_hook(lambda grad: grad / ranks)
    return x
