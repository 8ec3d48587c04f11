"""Sums of tokens along each document, across ranks: what positions, angles and decays of softmax attention are.

A rank sums its own pieces; of other ranks it needs one number a channel and segment, which all ranks gather and add up
in the order of the sequence. Backward is the same from right to left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .autograd import first_derivative_only
from .blockwise import fixed
from .blockwise.fold import summed
from .comm import Replicated
from .context import ShardedLayout
from .scan import Chain


def running_sum(
    x: Tensor,
    layout: ShardedLayout | None,
    cu_seqlens: Tensor | None,
    start: Tensor | None = None,
    held: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Σ of each document's tokens up to and with each one, of ``x [B, T, …]``, fp64.

    Args:
        start: the sums before each document ``[N, …]``, on every rank; its gradient is whole on every rank.
        held: what a state holds of a sum. Under a deterministic layout that is what goes on from block to block, so
            that whoever goes on from the state has the same bits.
    """
    if fixed(layout):
        before = None if start is None else start.double().flatten(1)
        return summed(x.double().flatten(2), before, layout, held).view(x.shape)
    out = _plain(x, layout, cu_seqlens)
    return out if start is None else out + _of_tokens(start.double(), x, layout, cu_seqlens)


def _of_tokens(rows: Tensor, x: Tensor, layout: ShardedLayout | None, cu_seqlens: Tensor | None) -> Tensor:
    """Rows of documents ``[N, …]`` as rows of tokens ``[B, T, …]``."""
    if layout is not None:
        rows = Replicated.apply(rows, layout.cp.comm)
        return rows.index_select(0, layout.documents)[None] if layout.packed else rows[:, None]
    if cu_seqlens is None:
        return rows[:, None]
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(x.shape[1], device=x.device), right=True)
    return rows.index_select(0, document)[None]


def _plain(x: Tensor, layout: ShardedLayout | None, cu_seqlens: Tensor | None) -> Tensor:
    """The sums where their bits may depend on the split."""
    flat = x.double().flatten(2)
    cu = cu_seqlens if layout is None else layout.cu_pieces.to(x.device)
    along = _AlongTokens.apply(flat)
    if cu is None:
        return along.view(x.shape)
    sums = torch.cat([flat.new_zeros(flat.shape[0], 1, flat.shape[2]), along], 1)
    token = torch.arange(x.shape[1], device=x.device)
    piece = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    starts = sums.index_select(1, cu[:-1])
    out = sums[:, 1:] - starts.index_select(1, piece)
    if layout is not None and layout.world_size * len(layout.segments) > 1:
        totals = sums.index_select(1, cu[1:]) - starts
        out = out + _Entering.apply(layout, totals).index_select(1, piece)
    return out.view(x.shape)


class _AlongTokens(torch.autograd.Function):
    """``x.cumsum(1)`` of ``[B, T, D]``, laid out by channels for it: along its last dimension a GPU's threads share a
    sum, and along any other each goes from element to element."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().cumsum(2).transpose(1, 2).contiguous()

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.transpose(1, 2).flip(2).contiguous().cumsum(2).flip(2).transpose(1, 2).contiguous()


class _Entering(torch.autograd.Function):
    """What each of this rank's pieces starts from ``[B, pieces, D]``, given what the pieces add."""

    @staticmethod
    def forward(ctx, layout: ShardedLayout, totals: Tensor) -> Tensor:
        ctx.layout, ctx.shape, ctx.way_back = layout, totals.shape, layout.cp.comm.agreement.way_back()
        chain, ends = _chain(layout)
        mine = [totals[:, last] for _, last in ends]
        everyone = _gather(layout, mine, totals)
        out, total = totals.new_zeros(totals.shape), totals.new_zeros(totals[:, :0].sum(1).shape)
        for s, added in enumerate(everyone(chain)):
            if chain.owners[s] == layout.rank and chain.needs[s]:
                out[:, ends[_place(layout, s)][0]] = total
            total = total + added if chain.passes[s] else added
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor):
        ctx.way_back()
        layout = ctx.layout
        chain, ends = _chain(layout)
        everyone = _gather(layout, [grad[:, first] for first, _ in ends], grad)
        out, total = grad.new_zeros(ctx.shape), grad.new_zeros(grad[:, :0].sum(1).shape)
        for s, entering in reversed(list(enumerate(everyone(chain)))):
            if chain.owners[s] == layout.rank:
                out[:, ends[_place(layout, s)][1]] += total
            total = (entering if chain.needs[s] else 0 * entering) + (total if chain.passes[s] else 0)
        return None, out


def _chain(layout: ShardedLayout) -> tuple[Chain, list[tuple[int, int]]]:
    """The layout's chain, and `_ends`, found once."""
    return layout.kept(_chain, lambda: (Chain.of(layout), _ends(layout)))


def _ends(layout: ShardedLayout) -> list[tuple[int, int]]:
    """The first and last local piece of each segment this rank owns."""
    where = [[i for i, p in enumerate(layout.pieces) if p.segment == s] for s in layout.local_segments()]
    return [(w[0], w[-1]) for w in where]


def _place(layout: ShardedLayout, segment: int) -> int:
    return layout.local_segments().index(segment)


def _gather(layout: ShardedLayout, mine: list[Tensor], like: Tensor) -> Callable[[Chain], list[Tensor]]:
    """Rows ``[B, D]``, one a segment, of all ranks; in the order of the chain."""
    count = max(len(layout.local_segments(r)) for r in range(layout.world_size))
    rows = like.new_zeros(count, like.shape[0], like.shape[2])
    for n, row in enumerate(mine):
        rows[n] = row
    with layout.cp.comm.streams.in_order():
        everyone = layout.cp.comm.all_gather(rows).wait()

    def in_order(chain: Chain) -> list[Tensor]:
        seen, out = [0] * layout.world_size, []
        for owner in chain.owners:
            out.append(everyone[owner, seen[owner]])
            seen[owner] += 1
        return out

    return in_order
