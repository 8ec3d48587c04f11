"""Results that do not depend on how sequences are split or packed, bit for bit.

Queries are computed in blocks that stand at fixed places of their document, against keys in blocks that do, in their
order, always in tensors of the same shapes:

    forward and dq   64 queries against 256 keys at a time, first keys first
    dk and dv        64 keys against 256 queries at a time, first queries first

A rank that owns some rows of a block computes all of it, with zeros for the rows of others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...context import CANONICAL_CHUNK
from ..geometry import Pair, Tokens
from ..geometry.fixed import FixedBlock, fixed_blocks
from ..geometry.tiles import Tile
from ..merging import Gradients, Partial, wide
from ..scores import Scores
from .backend import AttentionBackend, QueryRows
from .torch_backend import TorchBackend, tile_gradients

ACROSS = 4 * CANONICAL_CHUNK
"""Rows of the other side that a block meets at a time."""


class Canonical(AttentionBackend):
    """The PyTorch backend on blocks at fixed places."""

    name = "canonical"
    fixed_keys = True
    knows = TorchBackend.knows

    def __init__(self) -> None:
        self.block = TorchBackend()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        for own in fixed_blocks(pair.rows, CANONICAL_CHUNK):
            part = out.pick(own.rows, own.places, own.size)
            o, lse = part.wide()
            for b, one in _batch_rows(len(q), scores):
                sum_ = Partial(o[b].shape, wide(q.dtype), q.device)
                sum_.add(o[b].clone(), lse[b].clone())
                rows = own.fill(q[b])
                for keys in fixed_blocks(pair.keys, ACROSS):
                    if keys.seen_by(own, pair.reach):
                        met = Pair(own.tokens, keys.tokens, pair.reach)
                        sum_.add(*self.block.tile(rows, keys.fill(k[b]), keys.fill(v[b]), one, met, _whole(met)))
                o[b], lse[b] = sum_.result()
            out.put(part, own.places, own.rows)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        """Of keys that every rank holds: gradients of k and v are summed over the ranks elsewhere."""
        out.dq.add(self.query_gradients(x, k, v, scores, pair))
        dk, dv = self.key_gradients(x, k, v, scores, pair)
        out.dk.add(dk)
        out.dv.add(dv)

    def query_gradients(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair) -> Tensor:
        """dq of these rows, wide, given all keys they see."""
        dq = torch.zeros(x.q.shape, dtype=wide(x.q.dtype), device=x.q.device)
        for own in fixed_blocks(pair.rows, CANONICAL_CHUNK):
            for b, one in _batch_rows(len(dq), scores):
                rows, total = _filled(own, x, b), None
                for keys in fixed_blocks(pair.keys, ACROSS):
                    if keys.seen_by(own, pair.reach):
                        met = Pair(own.tokens, keys.tokens, pair.reach)
                        part = tile_gradients(rows, keys.fill(k[b]), keys.fill(v[b]), one, met, _whole(met))[0]
                        total = part if total is None else total + part
                if total is not None:
                    own.take(dq[b], total)
        return dq

    def key_gradients(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair) -> tuple[Tensor, Tensor]:
        """dk and dv of these keys, wide, given all rows that see them."""
        dk, dv = (torch.zeros(t.shape, dtype=wide(t.dtype), device=t.device) for t in (k, v))
        for own in fixed_blocks(pair.keys, CANONICAL_CHUNK):
            for b, one in _batch_rows(len(dk), scores):
                key, value, sums = own.fill(k[b]), own.fill(v[b]), None
                for queries in fixed_blocks(pair.rows, ACROSS):
                    if own.seen_by(queries, pair.reach):
                        met = Pair(queries.tokens, own.tokens, pair.reach)
                        found = tile_gradients(_filled(queries, x, b), key, value, one, met, _whole(met))[1:]
                        sums = found if sums is None else (sums[0] + found[0], sums[1] + found[1])
                if sums is not None:
                    own.take(dk[b], sums[0])
                    own.take(dv[b], sums[1])
        return dk, dv

    def row_sums(self, do: Tensor | None, o: Tensor, dlse: Tensor | None, rows: Tokens) -> Tensor:
        """`merging.row_sums`, block by block."""
        delta = torch.zeros(o.shape[0], o.shape[2], o.shape[1], dtype=wide(o.dtype), device=o.device)
        for own in fixed_blocks(rows, CANONICAL_CHUNK) if do is not None else ():
            for b in (slice(i, i + 1) for i in range(len(o))):
                product = own.fill(do[b]).to(delta.dtype) * own.fill(o[b]).to(delta.dtype)
                own.take(delta[b], product.sum(-1).transpose(1, 2).contiguous(), 2)
        return delta if dlse is None else delta - dlse.to(delta.dtype)

    def sink_rows(self, sinks: Tensor, lse: Tensor, delta: Tensor, rows: Tokens) -> Tensor:
        """What each row ``[B, H, T]`` gives to minus the gradient of the sinks ``[H]``, block by block."""
        out = torch.zeros_like(delta)
        for own in fixed_blocks(rows, CANONICAL_CHUNK):
            for b in (slice(i, i + 1) for i in range(len(lse))):
                weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - own.fill(lse[b], 2, torch.inf))
                own.take(out[b], weight * own.fill(delta[b], 2), 2)
        return out


def _batch_rows(count: int, scores: Scores) -> Iterator[tuple[slice, Scores]]:
    """Each batch row by itself; together where scores tell them apart."""
    if count > 1 and scores.beyond & {"alibi_slopes", "dropout_p"}:
        yield slice(None), scores
    else:
        yield from ((slice(b, b + 1), scores) for b in range(count))


def _filled(block: FixedBlock, x: QueryRows, b: slice) -> QueryRows:
    """The rows of a block; those not at hand give nothing."""
    assert x.delta is not None
    q, o, do = (block.fill(t[b]) for t in (x.q, x.o, x.do))
    return QueryRows(q, o, do, block.fill(x.lse[b], 2, torch.inf), block.fill(x.delta[b], 2))


def _whole(met: Pair) -> Tile:
    return Tile(0, len(met.rows), 0, len(met.keys), band=False)
