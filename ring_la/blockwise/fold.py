"""What passes from block to block along each document, in its order, and sums of tokens made of it.

Every rank has every block's part, a few numbers, and folds them alike: v ← step(v, part) from a document's first block
to its last one, or back. So what enters a block does not depend on who owns the blocks before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..context import ShardedLayout
from .blocks import BLOCK, blocks_of, filled, together


class OwnedBlock(NamedTuple):
    """A block of the sequence: its owner, its number among that rank's blocks, its document."""

    rank: int
    number: int
    document: int


def turns(layout: ShardedLayout) -> list[OwnedBlock]:
    """All blocks in the order of the sequence, found once."""
    return layout.kept(_found, lambda: _found(layout))


def _found(layout: ShardedLayout) -> list[OwnedBlock]:
    out: list[tuple[int, OwnedBlock]] = []
    for rank in range(layout.world_size):
        pieces = (p for s in layout.local_segments(rank) for p in layout.pieces_of(s))
        places = ((start, p.document) for p in pieces for start in range(p.start, p.stop, BLOCK))
        out += [(start, OwnedBlock(rank, n, document)) for n, (start, document) in enumerate(places)]
    return [turn for _, turn in sorted(out)]


def folded(
    own: Tensor, start: Tensor, step: Callable[[Tensor, Tensor], Tensor], layout: ShardedLayout, back: bool = False
) -> tuple[Tensor, Tensor]:
    """What enters each of this rank's blocks ``[n, B, …]``, and what leaves each document ``[N, …]``, on every rank.

    Args:
        own: the parts of this rank's blocks ``[n, B, …]``. start: what enters each document ``[N, …]``, its
            packed ones or rows. step: of a value ``[B, …]`` and a part, the next value. back: from last to first.
    """
    order = turns(layout)
    count = max(sum(t.rank == r for t in order) for r in range(layout.world_size))
    rows = own.new_zeros(count, *own.shape[1:])
    rows[: len(own)] = own
    with layout.cp.comm.streams.in_order():
        everyone = layout.cp.comm.all_gather(rows).wait()
    values = list((start[:, None] if layout.packed else start[None]).unbind(0))
    entering: list[Any] = [values[0]] * len(own)
    for t in reversed(order) if back else order:
        if t.rank == layout.rank:
            entering[t.number] = values[t.document]
        values[t.document] = step(values[t.document], everyone[t.rank, t.number])
    ends = torch.cat(values) if layout.packed else values[0]
    return torch.stack(entering) if entering else start.new_zeros(0, own.shape[1], *start.shape[1:]), ends


def of_tokens(x: Tensor, layout: ShardedLayout) -> Tensor:
    """Numbers of blocks ``[n, B, …]`` as those of their tokens ``[B, T, …]``."""
    return x.transpose(0, 1).index_select(1, layout.kept(_block_of, lambda: _block_of(layout)))


def _block_of(layout: ShardedLayout) -> Tensor:
    """The number of each local token's block."""
    numbers = [n for n, (start, stop) in enumerate(blocks_of(layout)) for _ in range(start, stop)]
    return torch.tensor(numbers, dtype=torch.int64, device=layout.cp.device)


def summed(
    x: Tensor, start: Tensor | None, layout: ShardedLayout, held: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Sums along documents up to and with each token, of ``x [B, T, D]``, given those before, ``start [N, D]``.
    `held`: what goes on of a sum from block to block."""
    N = layout.num_documents if layout.packed else x.shape[0]
    return _Summed.apply(layout, held, x, x.new_zeros(N, x.shape[2]) if start is None else start)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: ShardedLayout, held: Callable[..., Tensor] | None, x: Tensor, start: Tensor
    ) -> Tensor:
        ctx.layout, ctx.start = layout, torch.zeros_like(start)
        ctx.way_back = layout.cp.comm.agreement.way_back()
        keep = held or (lambda v: v)
        return _sums(x, start, lambda v, part: keep(v + part), layout)[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.way_back()
        return None, None, *_sums(grad, ctx.start, torch.add, ctx.layout, back=True)


def _sums(
    x: Tensor, start: Tensor, step: Callable[[Tensor, Tensor], Tensor], layout: ShardedLayout, back: bool = False
) -> tuple[Tensor, Tensor]:
    """Sums from each document's start, or its end, and the whole ones ``[N, D]``."""
    B, T, D = x.shape
    parts, totals = [], []
    for b in range(B):
        for begin, end in blocks_of(layout):
            block = filled(x, b, begin, end)
            y = block.flip(1).cumsum(1).flip(1)[0] if back else block.cumsum(1)[0]
            parts.append(y[: end - begin])
            totals.append(y[0] if back else y[end - begin - 1])
    own = torch.stack(totals).view(B, -1, D).transpose(0, 1) if totals else x.new_zeros(0, B, D)
    entering, ends = folded(own, start, step, layout, back)
    return together(parts, B, T, x) + of_tokens(entering, layout), ends
