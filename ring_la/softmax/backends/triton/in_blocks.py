"""Our kernels with the same bits however a sequence is split: `Canonical` in few launches.

The side that a row sums over stands in blocks, a tile each, at fixed places of its documents, filled up with rows of
nobody: keys are met first blocks first, queries last blocks first. To a row a block that it does not see is an exact
nothing, so that rows of any other place, document or rank may lie in its tile.

Blocks that a whole tile sees need no mask, and have the same bits without it: nothing is contracted
(``enable_fp_fusion``) but what says so, which a select in between would prevent. Where order, windows and documents are
all there is to the scores a row sees a span of those places, and the kernels of spans walk from block to block; other
scores go by the general kernels, by lists of the blocks that are seen.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....kernels.sizes import width
from ...geometry import ANY_DOCUMENT, Pair, Tokens, once
from ...geometry.fixed import NOBODY
from ...merging import Partial, row_sums
from ...scores import Scores
from ..backend import Ask, QueryRows
from ..canonical import Canonical
from . import spans, table
from .backend import TritonBackend
from .launch import General, apart, of_tokens, put_sums
from .plan import TileLists, meet
from .span_launch import BOUNDARY, OfSpans, fetchable
from .spans import SpanWork
from .table import TileSettings

FORWARD = {64: TileSettings(128, 64, 4, 2), 128: TileSettings(128, 64, 4, 2), 256: TileSettings(128, 64, 8, 2)}
BACKWARD_KEYS = {64: TileSettings(64, 64, 4, 2), 128: TileSettings(64, 64, 4, 2), 256: TileSettings(64, 64, 8, 2)}
BACKWARD_QUERIES = {64: TileSettings(64, 64, 4, 3), 128: TileSettings(64, 64, 4, 2), 256: TileSettings(64, 64, 4, 2)}
"""By heads, as `table` has them: the far side's tile is a block."""
BY_SPANS = True
"""Whether the kernels of spans do what they can."""


class RowsInBlocks(NamedTuple):
    """Rows in blocks at fixed places.

    Attributes:
        tokens: how they stand, those of nobody in no document.
        filled: the same, those of nobody in the document of their block.
        source: which row is at each place; None: they stand so already. nobody: whether none is.
        ends: documents, and the place behind the last row of each.
    """

    tokens: Tokens
    filled: Tokens
    source: Tensor | None
    nobody: Tensor | None
    ends: tuple[Tensor, Tensor]

    def fill(self, x: Tensor, dim: int = 1) -> Tensor:
        """`x` at the blocks' places, with any row where nobody is."""
        return x if self.source is None else x.index_select(dim, self.source)

    def fill_lse(self, lse: Tensor) -> Tensor:
        """``lse [B, H, T]`` at the blocks' places, and such that rows of nobody see nothing."""
        return lse if self.nobody is None else self.fill(lse, 2).masked_fill_(self.nobody, torch.inf)


def in_blocks(tokens: Tokens, size: int) -> RowsInBlocks:
    """The rows by document and position in blocks of that size, made once; empty where there are none."""
    return tokens.kept(in_blocks, lambda: _in_blocks(tokens, size), size)


def _in_blocks(tokens: Tokens, size: int) -> RowsInBlocks:
    position, document, index = (x.cpu() for x in (tokens.positions, tokens.documents, tokens.index))
    number = torch.div(position, size, rounding_mode="floor")
    which, block_of = torch.unique(torch.stack([document, number]), dim=1, return_inverse=True)
    places = block_of * size + position - number * size
    documents, which_of = torch.unique(document, return_inverse=True)
    last = torch.zeros_like(documents).scatter_reduce_(0, which_of, places + 1, "amax")
    length, device = which.shape[1] * size, tokens.device
    ends = documents.to(device), last.to(device)
    if torch.equal(places, torch.arange(len(places), device="cpu")):
        return RowsInBlocks(tokens, tokens, None, None, ends)
    at = (which[1] * size)[:, None] + torch.arange(size, device="cpu")
    of, stands, source = (torch.full((length,), x, device="cpu") for x in (NOBODY, 0, 0))
    of[places], stands[places], source[places] = document, index, torch.arange(len(places), device="cpu")
    everyone = which[0].repeat_interleave(size)
    own, filled = (Tokens(None, length, device, (at.flatten().to(device), d.to(device))) for d in (of, everyone))
    own.index = filled.index = stands.to(device)
    return RowsInBlocks(own, filled, source.to(device), (of == NOBODY).to(device), ends)


@once
def _of_queries(pair: Pair, bm: int, bn: int) -> TileLists:
    return _lists(*meet(pair, bm, bn))


@once
def _of_keys(pair: Pair, bm: int, bn: int) -> TileLists:
    seen, whole = (x.T.flip(1) for x in meet(pair, bm, bn))
    found = _lists(seen, whole)
    return found._replace(tiles=seen.shape[1] - 1 - found.tiles)


def _lists(seen: Tensor, whole: Tensor) -> TileLists:
    """Tiles that may be seen, first ones first; those that are seen whole, as far as none that is not comes before."""
    order = torch.argsort((~seen).to(torch.int8), dim=1, stable=True)
    first = whole.gather(1, order).to(torch.int64).cumprod(1).sum(1)
    counts = torch.stack([first, seen.sum(1)], 1)
    return TileLists(order.to(torch.int32).contiguous(), counts.to(torch.int32).contiguous())


@once
def _walk_over_keys(pair: Pair, rows: int, keys: int) -> SpanWork:
    """Items of at most `rows` queries, which walk blocks of `keys` keys."""
    return _walk(pair.rows, in_blocks(pair.keys, keys), *pair.reach, rows, keys)


@once
def _walk_over_queries(pair: Pair, rows: int, keys: int) -> SpanWork:
    """Items of at most `keys` keys, which walk blocks of `rows` queries."""
    left, right = pair.reach
    return _walk(pair.keys, in_blocks(pair.rows, rows), right, left, keys, rows)


def _walk(near: Tokens, far: RowsInBlocks, back: int | None, ahead: int | None, size: int, block: int) -> SpanWork:
    low, high = spans.spans_of(near, far.filled, back, ahead)
    documents, last = far.ends
    if len(documents):
        at = torch.searchsorted(documents, near.documents.contiguous()).clamp(max=len(documents) - 1)
        high = torch.maximum(low, torch.minimum(high, last[at].to(high.dtype)))
    return spans.work_of(near, (low, high), size, block, block)


def _tile(settings: dict[int, TileSettings], q: Tensor, v: Tensor, scores: Scores) -> TileSettings:
    return table.settings(settings, width(max(scores.sums or q.shape[3], v.shape[3])), q.dtype)


class InBlocks(General):
    """Launches over tiles of one side, of which each meets the other's blocks in order."""

    options: ClassVar[dict[str, Any]] = dict(enable_fp_fusion=False)

    def of_queries(self, how: TileSettings) -> TileLists:
        return _of_queries(self.pair, how.rows, how.keys)

    def of_keys(self, how: TileSettings) -> TileLists:
        return _of_keys(self.pair, how.rows, how.keys)


class SpansInBlocks(OfSpans):
    """Launches over items of one side, of which each walks the other's blocks."""

    options: ClassVar[dict[str, Any]] = dict(enable_fp_fusion=False)

    def of_queries(self, how: TileSettings) -> SpanWork:
        return _walk_over_keys(self.pair, how.rows, how.keys)

    def of_keys(self, how: TileSettings) -> SpanWork:
        return _walk_over_queries(self.pair, how.rows, how.keys)


def _spanned(q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair) -> bool:
    """Whether kernels of spans do it: by scores and heads alone, which are the same on all ranks. (Of nothing there are
    no descriptors, nor are there any bits.)"""
    if not BY_SPANS or scores.beyond - {"sums"} or not (q.numel() and k.numel()):
        return False
    heads = q[..., : scores.sums or None]
    fetched = all(x.shape[-1] * x.element_size() % BOUNDARY == 0 for x in (q, v))
    return fetched and not _shared(pair.keys) and OfSpans(scores, pair, heads, k, v, q).tried


def _shared(tokens: Tokens) -> bool:
    """Whether some rows are of every document."""
    return tokens.kept(_shared, lambda: bool((tokens.documents == ANY_DOCUMENT).any()))


def _ready(x: Tensor) -> Tensor:
    """`x` as kernels of either kind take it."""
    from ....kernels.runtime.launch import aligned

    return x if fetchable(x) and x.stride(-1) == 1 else aligned(x)


class CanonicalTriton(Canonical):
    """`Canonical` by the Triton kernels: its own bits, in a launch a pass."""

    def unsupported(self, ask: Ask) -> str:
        return TritonBackend().unsupported(ask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        from . import kernels, span_kernels

        spanned = _spanned(q, k, v, scores, pair)
        tiles = table.SPANS_FORWARD if spanned else FORWARD
        keys = in_blocks(pair.keys, _tile(tiles, q, v, scores).keys)
        q, k, v = _ready(q), _ready(keys.fill(k)), _ready(keys.fill(v))
        of_sums, q, k = apart(q, k, scores)
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        if spanned:
            SpansInBlocks(scores, pair, q, k, v, o, of_sums).over_queries(span_kernels.forward, tiles, o, lse)
        else:
            met = InBlocks(scores, Pair(pair.rows, keys.tokens, pair.reach), q, k, v, o, of_sums)
            met.over_queries(kernels.forward, tiles, q, k, v, o, lse)
        out.add(o, lse)

    def query_gradients(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair) -> Tensor:
        from ....kernels.runtime.launch import filled
        from . import kernels, span_kernels

        assert x.delta is not None
        spanned = _spanned(x.q, k, v, scores, pair)
        tiles = table.SPANS_QUERIES if spanned else BACKWARD_QUERIES
        keys = in_blocks(pair.keys, _tile(tiles, x.q, v, scores).keys)
        q, do, k, v = _ready(x.q), _ready(x.do), _ready(keys.fill(k)), _ready(keys.fill(v))
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if q.numel() and k.numel():
            of_sums, q, k = apart(q, k, scores)
            dc = None if of_sums is None else of_tokens(q)
            numbers, results = (x.lse.contiguous(), x.delta.contiguous()), (dq, *filled(dc, by=dq))
            if spanned:
                walks = SpansInBlocks(scores, pair, q, k, v, do, of_sums)
                walks.over_queries(span_kernels.backward_queries, tiles, do, *numbers, *results)
            else:
                met = InBlocks(scores, Pair(pair.rows, keys.tokens, pair.reach), q, k, v, do, of_sums)
                met.over_queries(kernels.backward_queries, tiles, q, k, v, do, *numbers, *results)
            put_sums((dq, None), (dc, None), scores)
        return dq

    def key_gradients(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair) -> tuple[Tensor, Tensor]:
        from ....kernels.runtime.launch import filled
        from . import kernels, span_kernels

        assert x.delta is not None
        spanned = _spanned(x.q, k, v, scores, pair)
        tiles = table.SPANS_KEYS if spanned else BACKWARD_KEYS
        rows = in_blocks(pair.rows, _tile(tiles, x.q, v, scores).rows)
        q, do, k, v = _ready(rows.fill(x.q)), _ready(rows.fill(x.do)), _ready(k), _ready(v)
        dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (k, v))
        if q.numel() and k.numel():
            of_sums, q, k = apart(q, k, scores)
            dc = None if of_sums is None else of_tokens(k)
            numbers = rows.fill_lse(x.lse).contiguous(), rows.fill(x.delta, 2).contiguous()
            results = dk, dv, *filled(dc, by=dk)
            if spanned:
                walks = SpansInBlocks(scores, pair, q, k, v, do, of_sums)
                walks.over_keys(span_kernels.backward_keys, tiles, *numbers, *results)
            else:
                met = InBlocks(scores, Pair(rows.filled, pair.keys, pair.reach), q, k, v, do, of_sums)
                met.over_keys(kernels.backward_keys, tiles, q, k, v, do, *numbers, *results)
            put_sums((None, dk), (None, dc), scores)
        return dk, dv

    def row_sums(self, do: Tensor | None, o: Tensor, dlse: Tensor | None, rows: Tokens) -> Tensor:
        """`merging.row_sums`, which forms each row's by itself."""
        return row_sums(do, o, dlse)
