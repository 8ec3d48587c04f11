"""What ties the blocks of a model's run together in autograd's graph: parameters they share, and where they meet.

A scalar, the chain, goes through all of it: backwards a meeting waits for the one after it, so that ranks with other
numbers of blocks exchange in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...autograd import first_derivative_only
from ...blockwise import BLOCK, exact_sum
from ...blockwise.blocks import filled, together
from ...blockwise.sums import part_of
from ...context import ShardedLayout

Place = tuple[int, int, int]
"""Row, first token, behind the last."""


class RankBlocks(NamedTuple):
    """The blocks of a rank's tokens ``[rows, tokens, …]``."""

    places: list[Place]
    rows: int
    tokens: int

    def whole(self, blocks: Sequence[Tensor]) -> Tensor:
        """Blocks ``[1, 64, …]`` as ``[rows, tokens, …]``."""
        parts = [x[0, : stop - start] for x, (_, start, stop) in zip(blocks, self.places)]
        return together(parts, self.rows, self.tokens, blocks[0])


class SharedParameters(torch.autograd.Function):
    """Parameters as each block's run has them, and the first link of the chain; their gradients are added exactly."""

    @staticmethod
    def forward(ctx: Any, layout: ShardedLayout, blocks: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.blocks, ctx.like = layout, blocks, [p.detach() for p in parameters]
        ctx.way_back = layout.cp.comm.agreement.way_back()
        ctx.set_materialize_grads(False)
        chain = torch.zeros((), device=layout.cp.device)
        return chain, *(p.view_as(p) for p in parameters for _ in range(blocks))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> Any:
        ctx.way_back()
        layout, n = ctx.layout, ctx.blocks
        each = [grads[i * n : (i + 1) * n] for i in range(len(ctx.like))]
        present = torch.tensor([float(any(g is not None for g in of)) for of in each], device=layout.cp.device)
        if layout.cp.comm.size > 1:  # of experts a rank may meet others
            present = layout.cp.comm.all_reduce(present, dist.ReduceOp.MAX).wait()
        out: list[Tensor | None] = []
        for p, of, some in zip(ctx.like, each, present.tolist()):
            rows = torch.stack([torch.zeros_like(p) if g is None else g for g in of]) if some else None
            out.append(None if rows is None else part_of(exact_sum(rows, layout), layout, p))
        return None, None, *out


class JoinedBlocks(torch.autograd.Function):
    """Blocks of tensors as these tensors ``[B, T, …]``; the chain and what is shared as they are."""

    @staticmethod
    def forward(ctx: Any, blocks: RankBlocks, count: int, chain: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.count, n = blocks, count, len(blocks.places)
        ctx.set_materialize_grads(False)
        out = [blocks.whole(x[i * n : (i + 1) * n]) for i in range(count)]
        return chain.view_as(chain), *out, *(t.view_as(t) for t in x[count * n :])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, chain: Tensor | None, *grads: Tensor | None) -> Any:
        places, out = ctx.blocks.places, []
        for g in grads[: ctx.count]:
            out += [None if g is None else filled(g, *place) for place in places]
        return None, None, chain, *out, *grads[ctx.count :]


class PartedBlocks(torch.autograd.Function):
    """A tensor ``[B, T, …]`` as its blocks, or as it is."""

    @staticmethod
    def forward(ctx: Any, blocks: RankBlocks, one: bool, chain: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.one, ctx.like = blocks, one, None if one else y.detach()[:0]
        ctx.set_materialize_grads(False)
        return chain.view_as(chain), *((y.view_as(y),) if one else (filled(y, *place) for place in blocks.places))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, chain: Tensor | None, *grads: Tensor | None) -> Any:
        if ctx.one or all(g is None for g in grads):
            return None, None, chain, grads[0]
        parts = [ctx.like.new_zeros(1, BLOCK, *ctx.like.shape[2:]) if g is None else g for g in grads]
        return None, None, chain, ctx.blocks.whole(parts)
