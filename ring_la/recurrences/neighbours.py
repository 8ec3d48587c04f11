"""Numbers of other tokens, wherever these are: each token's successor, each document's first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..context import ShardedLayout
from ..linear import Seams
from .definition import CommonOptions


def successors(c: Tensor, options: CommonOptions) -> Tensor:
    """Each token's successor in its document, zero after the last."""
    layout, cu = options.layout, options.cu_seqlens
    if layout is not None:
        ranks = range(layout.world_size)
        return layout.route("successors", lambda: [layout.successors(r) for r in ranks])(c, 1)
    after = torch.cat([c[:, 1:], torch.zeros_like(c[:, :1])], 1)
    if cu is None:
        return after
    last = torch.isin(torch.arange(1, c.shape[1] + 1, device=c.device), cu)
    return after.masked_fill(last[:, None], 0)


def first_tokens(c: Tensor, options: CommonOptions) -> Tensor:
    """Each document's first token ``[N, H]``, on every rank; zero where it has none."""
    layout, cu = options.layout, options.cu_seqlens
    if layout is not None:
        return _FirstTokens.apply(layout, c)
    if c.shape[1] == 0:
        return c.new_zeros(c.shape[0] if cu is None else cu.numel() - 1, c.shape[2])
    if cu is None:
        return c[:, 0]
    first = c[0].index_select(0, cu[:-1].clamp(max=c.shape[1] - 1))
    return first.masked_fill((cu.diff() == 0)[:, None], 0)


class _FirstTokens(torch.autograd.Function):
    """Documents' first tokens on every rank. What flows back is whole on every rank already, as the gradient of an
    initial state is: each takes what belongs to its own tokens."""

    @staticmethod
    def forward(ctx: Any, layout: ShardedLayout, c: Tensor) -> Tensor:
        ctx.layout, ctx.shape = layout, c.shape
        pieces, documents = Seams.of(layout).starts
        out = c.new_zeros(c.shape[0], layout.num_documents, c.shape[2])
        out.index_copy_(1, documents, c.index_select(1, _starts(layout, pieces)))
        with layout.cp.comm.streams.in_order():
            out = layout.cp.comm.all_reduce(out).wait()
        return out[0] if layout.packed else out[:, 0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        layout = ctx.layout
        pieces, documents = Seams.of(layout).starts
        rows = grad[None] if layout.packed else grad[:, None]
        out = grad.new_zeros(ctx.shape)
        return None, out.index_copy_(1, _starts(layout, pieces), rows.index_select(1, documents))


def _starts(layout: ShardedLayout, pieces: Tensor) -> Tensor:
    """Where these local pieces start."""
    return layout.cu_pieces.to(pieces.device).long().index_select(0, pieces)
