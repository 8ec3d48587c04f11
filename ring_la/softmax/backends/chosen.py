"""Kernels for queries that see chosen keys alone, and their form in PyTorch.

A choice names the place in the whole sequence of the first of `scores.block` keys. Of these a query sees, as ever,
those of its document within its reach. A block of keys holds some of what is chosen: choices that stand elsewhere are
passed over, so that every strategy serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Pair
from ..merging import Gradients, Partial, wide
from ..scores import Scores
from .backend import AttentionBackend, QueryRows

NUMBERS = 1 << 22
"""Numbers of chosen keys and values that exist at once on a CPU, beside one query's."""
ON_GPUS = 1 << 27
"""The same on a GPU, which many small strips would leave idle."""


class ChosenBackend(AttentionBackend):
    """A kernel that takes a choice.

    Attributes:
        chosen: int ``[B, Tq, Hk or 1, S]``; −1: nothing.
    """

    knows = frozenset({"scale"})
    chosen: Tensor

    def of(self, chosen: Tensor) -> ChosenBackend:
        """The kernel with a choice."""
        out = copy(self)
        out.chosen = chosen
        return out


class _ChosenStrip(NamedTuple):
    """Some queries ``[B, Hk, n, G, K]``, their chosen keys and values ``[B, Hk, n, m, ·]``, wide; scores, −∞ where
    unseen; and where the keys stand among the rows of all heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    at: Tensor
    rows: slice


class TorchChosen(ChosenBackend):
    """Chosen keys gathered for a few queries at a time."""

    name = "torch"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        for x in self._strips(q, k, v, scores, pair):
            lse = torch.logsumexp(x.s, -1)
            p = torch.exp(x.s - torch.where(torch.isneginf(lse), 0.0, lse)[..., None])
            out.add(_tokens_first(p @ x.v), lse.transpose(2, 3).flatten(1, 2), x.rows)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        (B, Tk, Hk, K), V, dtype = k.shape, v.shape[3], wide(k.dtype)
        dk, dv = (k.new_zeros(B * Hk * Tk, width, dtype=dtype) for width in (K, V))
        for y in self._strips(x.q, k, v, scores, pair):
            lse, delta = (t[:, :, y.rows].unflatten(1, (Hk, -1)).transpose(2, 3)[..., None] for t in (x.lse, x.delta))
            p = torch.exp(y.s - torch.where(torch.isneginf(lse), torch.inf, lse))
            do = _heads_first(x.do[:, y.rows], Hk)
            ds = p * (do @ y.v.mT - delta)
            out.dq.add(_tokens_first(ds @ y.k * scores.scale), y.rows)
            dk.index_add_(0, y.at.flatten(), (ds.mT @ y.q * scores.scale).flatten(0, -2))
            dv.index_add_(0, y.at.flatten(), (p.mT @ do).flatten(0, -2))
        for total, grad in ((out.dk, dk), (out.dv, dv)):
            total.add(grad.view(B, Hk, Tk, -1).transpose(1, 2))

    def _strips(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair) -> Iterator[_ChosenStrip]:
        B, Tk, Hk, K = k.shape
        if not Tk:
            return
        flat = [t.transpose(1, 2).flatten(0, 2) for t in (k, v)]  # [B·Hk·Tk, ·]
        first = (torch.arange(B * Hk, device=q.device) * Tk).view(B, Hk, 1, 1)
        most = self.chosen.shape[3] * scores.block
        n = max(1, (ON_GPUS if q.is_cuda else NUMBERS) // max(1, B * Hk * most * (K + v.shape[3])))
        for a in range(0, q.shape[1], n):
            rows = slice(a, min(a + n, q.shape[1]))
            at, seen = _seen(self.chosen[:, rows], scores.block, pair, rows)
            if not at.shape[3]:
                continue
            at, seen = (t.transpose(1, 2).expand(-1, Hk, -1, -1) for t in (at, seen))
            at = at + first
            q_, k_, v_ = _heads_first(q[:, rows], Hk), *(t[at].to(wide(q.dtype)) for t in flat)
            s = (q_ @ k_.mT * scores.scale).masked_fill(~seen[:, :, :, None], -torch.inf)
            yield _ChosenStrip(q_, k_, v_, s, at, rows)


def _seen(chosen: Tensor, block: int, pair: Pair, rows: slice) -> tuple[Tensor, Tensor]:
    """The keys that `rows` have chosen here, int64 ``[B, n, Hk or 1, m]``, and which of them they see; m is what the
    row that sees most has."""
    places, keys, queries = pair.keys.places, pair.keys, pair.rows
    at = chosen[..., None] + torch.arange(block, device=chosen.device)
    inside = (chosen[..., None] >= 0) & (at < len(places))
    at = places[torch.where(inside, at, 0)].long().flatten(3)
    seen = inside.flatten(3) & (at >= 0)
    at = at.clamp_(min=0)
    of_row = [x[rows, None, None] for x in (queries.positions, queries.documents)]
    distance, same = keys.positions[at] - of_row[0], keys.documents[at] == of_row[1]
    left, right = pair.reach
    seen &= same
    if right is not None:
        seen &= distance <= right
    if left is not None:
        seen &= distance >= -left
    most = seen.shape[-1] if seen.is_meta else int(seen.sum(-1).max())  # of what has no values it may be all
    order = seen.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :most]
    return at.gather(-1, order), seen.gather(-1, order)


def _heads_first(x: Tensor, groups: int) -> Tensor:
    """``[B, n, H, D] → [B, Hk, n, G, D]``, wide."""
    return x.to(wide(x.dtype)).unflatten(2, (groups, -1)).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """``[B, Hk, n, G, D] → [B, n, H, D]``."""
    return x.transpose(1, 2).flatten(2, 3)
