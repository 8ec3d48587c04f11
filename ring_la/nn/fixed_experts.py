"""A mixture of experts under a deterministic layout, where no shape depends on what the router chose.

Each expert reads all of a rank's tokens, zeros in rows that are not its own, so that its products are those of any
linear layer (`blockwise.linear`): a row's bits depend on the row alone, and gradients of weights are exact sums. That
is E / k times the work of an expert's own rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd import outside_graphs
from ..blockwise import by_block, by_element, exact_sum, linear, over
from ..blockwise.sums import OF_TOKENS
from ..context import ShardedLayout
from ..kernels.fused.swiglu import swiglu
from .layer import wide


class Routed(NamedTuple):
    """What a router makes of this rank's tokens, each ``[B, T, E]``."""

    p: Tensor
    """Probabilities."""
    weights: Tensor
    """Of the experts a token goes through; zero for the others."""
    taken: Tensor
    """Which these are, bool."""


def routed(logits: Tensor, top_k: int, renormalize: bool, layout: ShardedLayout) -> Routed:
    """The router's choice, of its ``logits [B, T, E]``."""
    return Routed(*by_block(functools.partial(_chosen, top_k, renormalize), logits, layout=layout))


def _chosen(top_k: int, renormalize: bool, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = logits.softmax(-1)
    weights, chosen = p.topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    none = torch.zeros_like(p)
    return p, none.scatter(-1, chosen, weights), none.bool().scatter(-1, chosen, True)


def mixed(x: Tensor, routed: Routed, up: Tensor, out: Tensor, layout: ShardedLayout) -> Tensor:
    """The sum of each token's experts, of ``x [B, T, D]`` and all experts' weights ``[E, …]``, one after the other."""
    total = None
    each = up.unbind(0), out.unbind(0), routed.weights.split(1, -1), routed.taken.split(1, -1)
    for up_proj, out_proj, weight, taken in zip(*each):
        hidden = by_block(swiglu, linear(torch.where(taken, x, 0), up_proj, layout=layout), layout=layout)
        y = linear(by_block(_times, hidden, weight, layout=layout), out_proj, layout=layout)
        total = wide(y) if total is None else total + wide(y)
    assert total is not None
    return total.to(y.dtype)


@by_element
def _times(h: Tensor, weight: Tensor) -> Tensor:
    """A weight commutes with the last product."""
    return (wide(h) * over(weight, h.shape[-1])).to(h.dtype)


@by_element
def gated(o: Tensor, gate: Tensor) -> Tensor:
    """``o σ(gate)``, gate ``[B, T, 1]``."""
    return (wide(o) * over(torch.sigmoid(wide(gate)), o.shape[-1])).to(o.dtype)


@outside_graphs
def statistics(routed: Routed, layout: ShardedLayout) -> Tensor:
    """Assignments of each expert and sums of its probabilities over the whole sequence, fp64 ``[2, E]``. Collective."""
    counts = layout.cp.comm.all_reduce(routed.taken.flatten(0, 1).sum(0).double()).wait()
    return torch.stack([counts, exact_sum(routed.p.detach().flatten(0, 1), layout, OF_TOKENS)])
