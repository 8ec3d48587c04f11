"""The rows before each piece, its lead, and the last rows of each document: what one rank knows and others need."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from ..blockwise import blocks_of
from ..comm import Replicated, Route, SumOverRanks
from ..context import ShardedLayout
from ..kernels.fused.short_conv import LedTokens
from ..linear import Seams
from .arguments import TailOptions


def behind(
    x: Tensor, width: int, initial: Tensor | None, layout: ShardedLayout | None, cu_seqlens: Tensor | None
) -> LedTokens:
    """The tokens of ``x [B, T, D]``, of any dtype, behind the `width` before them.

    `initial` are the rows before each document ``[N, width, D]``; None: zeros.
    """
    return LedTokens.of(x, width, *leads(x, width, initial, layout, cu_seqlens))


def leads(
    x: Tensor, width: int, initial: Tensor | None, layout: ShardedLayout | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The `width` rows before each piece ``[B, pieces, width, D]`` (None: zeros), and the pieces' offsets (None: one).

    `initial` is ``[N, width, D]``. Before a document stands its initial state, before another piece what other ranks
    hold of it.
    """
    if layout is None:
        packed = cu_seqlens is not None
        return None if initial is None else initial[None] if packed else initial[:, None], cu_seqlens
    halo = halo_route(layout, width)(x, 1)
    if initial is not None:
        halo = halo + initial_rows(x, width, initial, layout).to(x.dtype)
    return halo.unflatten(1, (len(layout.pieces), width)), layout.cu_pieces.to(x.device)


def block_leads(x: Tensor, width: int, initial: Tensor | None, layout: ShardedLayout) -> tuple[Tensor, Tensor]:
    """The `width` rows before each of this rank's blocks ``[B, blocks, width, D]``, and the last ones of its pieces."""
    lead, _ = leads(x, width, initial, layout, None)
    assert lead is not None
    rows = torch.cat([x, lead.flatten(1, 2).to(x.dtype)], 1)
    before, last = layout.kept(_before_blocks, lambda: _before_blocks(layout, width, x.device), width)
    at_blocks, at_ends = (rows.index_select(1, i.flatten()).unflatten(1, i.shape) for i in (before, last))
    return at_blocks, at_ends


def _before_blocks(layout: ShardedLayout, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of rows among the tokens and, behind them, the pieces' leads: before each block, at each piece's end."""
    offsets, blocks = layout.piece_offsets, blocks_of(layout)

    def place(piece: int, row: int) -> int:
        start = offsets[piece]
        return row if row >= start else layout.local_length + piece * width + row - start + width

    piece_of = [bisect_right(offsets, start) - 1 for start, _ in blocks]
    before = [[place(p, start - width + j) for j in range(width)] for p, (start, _) in zip(piece_of, blocks)]
    last = [[place(p, stop - width + j) for j in range(width)] for p, stop in enumerate(offsets[1:])]
    sizes = (len(before), width), (len(last), width)
    return tuple(torch.tensor(x, dtype=torch.int64, device=device).view(s) for x, s in zip((before, last), sizes))  # type: ignore[return-value]


def halo_route(layout: ShardedLayout, width: int) -> Route:
    """Brings the `width` rows before each of this rank's pieces, zeros where a document starts."""
    ranks = range(layout.world_size)
    return layout.route(("lead", width), lambda: [_before(layout, r, width)[0] for r in ranks], neighbours=True)


def initial_rows(x: Tensor, width: int, initial: Tensor, layout: ShardedLayout) -> Tensor:
    """The rows of the initial states ``[N, width, D]`` that stand before this rank's pieces, else zeros."""
    rows = (initial[None] if layout.packed else initial[:, None]).flatten(1, 2)
    place = layout.kept(Tensor, lambda: _before(layout, layout.rank, width)[1].to(x.device), "rows before", width)
    mine = Replicated.apply(rows, layout.cp.comm).index_select(1, place.clamp(min=0))
    return mine.masked_fill((place < 0)[:, None], 0)


def final_rows(ends: Tensor, initial: Tensor | None, options: TailOptions) -> Tensor:
    """Each document's last rows ``[N, width, D]`` on every rank, from those of this rank's pieces."""
    layout = options.layout
    if layout is None:
        return ends[:, 0] if options.cu_seqlens is None else ends[0]
    seams = Seams.of(layout)
    pieces, documents = seams.ends
    out = ends.new_zeros(ends.shape[0], layout.num_documents, *ends.shape[2:])
    out = out.index_copy(1, documents, ends.index_select(1, pieces))
    out = SumOverRanks.apply(out, layout.cp.comm)
    if initial is not None and len(seams.empty):
        own = Replicated.apply(initial, layout.cp.comm).to(out.dtype).index_select(0, seams.empty)
        out = out.index_copy(1, seams.empty, own[None])
    return out[0] if layout.packed else out[:, 0]


def _before(layout: ShardedLayout, rank: int, width: int) -> tuple[Tensor, Tensor]:
    """The `width` rows before each piece of a rank: tokens of the sequence, or rows of the initial states (else −1)."""
    tokens, rows = [], []
    for s in layout.local_segments(rank):
        for p in layout.pieces_of(s):
            first = layout.cu_seqlens[p.document]
            for t in range(p.start - width, p.start):
                tokens.append(t if t >= first else -1)
                rows.append(-1 if t >= first else p.document * width + t - first + width)
    return torch.tensor(tokens, dtype=torch.int64, device="cpu"), torch.tensor(rows, dtype=torch.int64, device="cpu")


def together(o: Tensor, final: Tensor | None, layout: ShardedLayout | None) -> tuple[Tensor, Tensor | None]:
    """An output and a final state, whose gradients go back together under a layout."""
    return (o, final) if layout is None or final is None else _Together.apply(o, final)


class _Together(torch.autograd.Function):
    """Two outputs whose gradients go back together, zero where one is not used: the way back of a final state sums
    over ranks, so every rank must take it even if its own loss does not use the state."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        return o.view_as(o), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        return do, dfinal
