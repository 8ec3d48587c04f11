"""A sequence in rounds: run after run of tokens, each split over all ranks, states handed from one to the next.

The activations that exist at a time are those of one round, whatever the length of the sequence; what stays of the
others is what `recompute` keeps. Gradients flow through the states, so loss and gradients are those of the whole
sequence. For models whose every layer is a recurrence: the state of softmax attention is all its keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..context import ContextParallel
from ..errors import ArgumentError, UnsupportedError, describe_tensor
from ..layout import check_cu_seqlens
from ..nn import KVCache, MixtureOfExperts
from .loss import IGNORE, linear_cross_entropy

if TYPE_CHECKING:
    from .hybrid import HybridLM


def loss_in_rounds(
    model: HybridLM,
    ids: Tensor,
    cp: ContextParallel,
    *,
    rounds: int,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    total: Tensor | int | None = None,
    chunk: int = 8192,
) -> Tensor:
    """The loss of a whole sequence, round by round.

    Args:
        ids: int ``[1, T]``, the whole sequence, on every rank.
        cp: the ranks each round is split over. rounds: their number.
        cu_seqlens: offsets ``[N+1]`` of packed documents; None: one document.
        total: the number of targets to divide by; None: those of `ids`.
        chunk: tokens whose logits exist at a time.

    Returns:
        This rank's part of the mean loss.

    Raises:
        ArgumentError: by name. UnsupportedError: a layer whose state grows with the sequence, or a router balanced over
            the whole of it.
    """
    cu = _check(model, ids, cp, rounds, cu_seqlens)
    T = ids.shape[1]
    ends = torch.zeros(T, dtype=torch.bool)
    ends[torch.tensor([c - 1 for c in cu[1:] if c > 0])] = True
    targets = ids.roll(-1, 1).masked_fill(ends.to(ids.device), IGNORE).long()
    total = max(1, T - int(ends.sum())) if total is None else total
    loss, states, borders = 0.0, None, [T * i // rounds for i in range(rounds + 1)]
    for start, stop in zip(borders, borders[1:]):
        inside = [start, *cu[bisect_right(cu, start) : bisect_left(cu, stop)], stop]
        layout = cp.layout(stop - start, cu_seqlens=[c - start for c in inside] if cu_seqlens is not None else None)
        if states is not None:
            states = [carried(state, start not in cu, len(inside) - 1, cp.size) for state in states]
        mine = layout.shard(ids[:, start:stop])
        x, states = model.hidden(mine, states=states, output_states=stop < T, layout=layout)
        labels = layout.shard(targets[:, start:stop]).flatten()
        weight = model.embedding.weight if model.head is None else model.head.weight
        loss = loss + linear_cross_entropy(x.flatten(0, 1), weight, labels, chunk=chunk) / total
    return loss


def _check(
    model: HybridLM, ids: Tensor, cp: ContextParallel, rounds: int, cu_seqlens: Tensor | Sequence[int] | None
) -> tuple[int, ...]:
    """Refuse what does not fit; the documents' offsets."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
        raise ArgumentError("ids", "an int tensor [1, T]", describe_tensor(ids))
    if not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel", type(cp).__name__)
    T = ids.shape[1]
    if not isinstance(rounds, int) or not 1 <= rounds <= T:
        raise ArgumentError("rounds", f"an int from 1 to {T}", repr(rounds))
    for name, block in zip(model.config.layers, model.blocks):
        if block.layer.state_type is KVCache:
            raise UnsupportedError("rounds", "recurrent layers alone", f"a layer of kind {name!r}")
        if isinstance(block.mlp, MixtureOfExperts) and (block.mlp.balance_coef or block.mlp.z_coef):
            got = "auxiliary losses, which are of the whole sequence"
            raise UnsupportedError("rounds", "no auxiliary losses", got, "Set balance_coef and z_coef to 0")
    return (0, T) if cu_seqlens is None else check_cu_seqlens(cu_seqlens, T)


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
