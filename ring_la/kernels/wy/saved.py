"""What the parts of a recurrence in WY form hand to each other, and what its output leaves for its gradients."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import SpanMaps
from ring_la.kernels.spans import table
from ring_la.kernels.spans.plan import SpanPlan


class SavedProducts(NamedTuple):
    """What chunks compute from their own tokens and gradients need again; None where a rule has no such thing. In the
    letters of `forward` and `dplr_products`:"""

    factors: Tensor | None = None
    """F: a scalar decay's by token, and β [B, NC, H, 4, C]."""
    running: Tensor | None = None
    """G: the running log-decays per key channel [B, T, H, K]."""
    low: Tensor | None = None
    """The level from which pairs are computed one by one [B, NC, H]."""
    pairs: Tensor | None = None
    """A, what o has of U [B, T, H, C]."""
    pairs_rest: Tensor | None = None
    """What A's rounding left, where that matters (`fine`)."""
    inverse: Tensor | None = None
    """M − I [B, T, H, C]."""
    value_pairs: Tensor | None = None
    """A_k, what o has of V beside U, under dplr."""
    value_reads: Tensor | None = None
    """L, what U has of V, under dplr."""
    bounds: Tensor | None = None
    """What the norms of chunks' transitions are at most (`horizon`) [B, H, NC]."""
    weighed_q: Tensor | None = None
    """`ChunkProducts.q` and the three behind it, where they are kept (`table.SAVED_WEIGHED`) and not weighed again."""
    weighed_reads: Tensor | None = None
    weighed_writes: Tensor | None = None
    weighed_values: Tensor | None = None


class ChunkProducts(NamedTuple):
    """What the passes over spans read: q and what reads the state for U, what is written to it with U and (dplr) with
    V, and the rest."""

    q: Tensor
    reads: Tensor | None
    writes: Tensor
    value_writes: Tensor | None
    saved: SavedProducts

    @property
    def kept(self) -> SavedProducts:
        """`saved`, with what the passes read if that is to be kept."""
        weighed = self[:4]
        size = sum(x.numel() * x.element_size() for x in weighed if x is not None)
        if self.saved.running is None or size > table.SAVED_WEIGHED:
            return self.saved
        q, reads, writes, values = weighed
        return self.saved._replace(weighed_q=q, weighed_reads=reads, weighed_writes=writes, weighed_values=values)


class ChunkStates(NamedTuple):
    """U of every token (under additive writes V itself) and the state before every chunk, [V, K], in the inputs'
    dtype."""

    u: Tensor
    states: Tensor


class ChunkAdjoints(NamedTuple):
    """The gradients of the states after the chunks, [V, K], of R (see `backward`), and under dplr of V."""

    adjoints: Tensor
    dr: Tensor
    dv: Tensor | None


class WYMaps(NamedTuple):
    """What is found for a summary; no maps: of a single span nobody asked for them."""

    products: ChunkProducts
    maps: SpanMaps | None

    @property
    def savable(self) -> tuple[Tensor | None, ...]:
        dense = self.maps is not None and self.maps.kind == "dense"
        return (*self.products.saved, self.maps.transition if dense else None)


class WYBack(NamedTuple):
    """What is found for an adjoint: also the spans' maps back, and once prepared the states before the chunks."""

    forward: WYMaps
    back: SpanMaps | None
    prepared: ChunkStates | None = None


class WYSaved(NamedTuple):
    """What spares the gradients work; `flat` as autograd keeps it."""

    products: SavedProducts = SavedProducts()
    entering: Tensor | None = None
    """The states that enter the spans."""
    transitions: Tensor | None = None
    """Dense ones of all spans."""
    later_transitions: Tensor | None = None
    """Of a call that no state enters: without each piece's first."""
    passed: Tensor | None = None
    """The products of each piece's dense transitions, where states go through it."""
    u: Tensor | None = None
    """U of every token, where it is not V."""
    states: Tensor | None = None
    """Those before the chunks."""

    @classmethod
    def of(cls, flat: tuple[Tensor | None, ...]) -> WYSaved:
        if not flat:
            return cls()
        rest = iter(flat)
        return cls(SavedProducts(*islice(rest, len(SavedProducts._fields))), *rest)

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        products, *rest = self
        return (*products, *rest)


def fine(plan: SpanPlan) -> bool:
    """Whether what A's rounding leaves is kept: where no delta rule rounds more, it would be most of dv's error."""
    return not plan.dense and plan.dtype != torch.float32
