"""``y = x Wᵀ + b`` block by block.

    dx = dy W for each block,     dW = Σ dyᵀ x over the blocks of all ranks, added exactly

Channels of dy and x are first divided by a power of two above their largest numbers, so that one bound, 64, holds for
every product and dW's small entries keep their bits beside large ones.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..autograd import first_derivative_only, outside_graphs
from ..context import ShardedLayout
from .blocks import BLOCK, blocks_of, filled, fixed, together
from .sums import OF_BLOCKS, OF_TOKENS, exact_sum, largest, part_of, power_above, rounded
from .switch import by_length, halves, places_of


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: ShardedLayout | None) -> Tensor:
    """``x Wᵀ + b`` of ``x [B, T, D]``, ``weight [N, D]`` and ``bias [N]``; see `by_block`."""
    if not fixed(layout):
        return F.linear(x, weight, bias)
    layout.require_local("x", x.shape[1])
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _apart(layout, x, weight, bias)


@outside_graphs
def _apart(layout: ShardedLayout, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _Linear.apply(layout, _read_of(x), x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: ShardedLayout, read: _Read, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.layout, ctx.has_bias, ctx.way_back = layout, bias is not None, layout.cp.comm.agreement.way_back()
        ctx.read = read
        ctx.save_for_backward(x, weight)
        if halves(x, weight):
            from ..kernels.fixed.product import row_product  # needs Triton

            return row_product(x, weight, bias, transposed=True)
        with torch.autocast(x.device.type, enabled=False):
            parts = [F.linear(filled(x, b, s, e)[0], weight, bias)[: e - s] for b, s, e in _places(x, layout)]
        return together(parts, x.shape[0], x.shape[1], x.new_empty(0, 0, len(weight)))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layout, places = ctx.layout, _places(x, ctx.layout)
        _, _, need_x, need_weight, need_bias = ctx.needs_input_grad
        dx = dweight = dbias = None
        if need_weight or need_bias:
            ctx.way_back()
        if halves(x, weight):
            return None, None, *_at_once(dy.to(x.dtype), x, weight, ctx)
        if need_x:
            dx = together([(filled(dy, *p)[0] @ weight)[: p[2] - p[1]] for p in places], x.shape[0], x.shape[1], x)
        if need_weight:
            dweight = _weight_gradient(dy, x, weight, layout)
        if ctx.has_bias and need_bias:
            rows = [filled(dy, *p)[0].sum(0) for p in places]
            like = weight.new_empty(len(weight))
            dbias = part_of(exact_sum(torch.stack(rows) if rows else like[None][:0], layout), layout, like)
        return None, None, dx, dweight, dbias


def _at_once(dy: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients by a launch each, of tensors of two bytes."""
    from ..kernels.fixed.product import row_product  # needs Triton

    _, _, need_x, need_weight, need_bias = ctx.needs_input_grad
    dx = row_product(dy, weight) if need_x else None
    dweight = _weight_at_once(dy, x, weight, ctx.layout, ctx.read) if need_weight else None
    dbias = None
    if ctx.has_bias and need_bias:
        like = weight.new_empty(len(weight))
        dbias = part_of(exact_sum(dy.flatten(0, 1), ctx.layout, OF_TOKENS), ctx.layout, like)
    return dx, dweight, dbias


class _Read:
    """What linear layers that read the same tensor share going back: bounds of its columns under a layout."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.layout: ShardedLayout | None = None
        self.bounds: Any = None


_read: MutableMapping[Tensor, _Read] = WeakTensorKeyDictionary()


def _read_of(x: Tensor) -> _Read:
    """That of `x`; one of its own for what no graph made, which may hold other numbers when a step is replayed."""
    found = _read.get(x) if x.grad_fn is not None else None
    if found is None or found.version != x._version:
        found = _Read(x._version)
        if x.grad_fn is not None:
            _read[x] = found
    return found


def _weight_at_once(dy: Tensor, x: Tensor, weight: Tensor, layout: ShardedLayout, read: _Read) -> Tensor:
    """This rank's part of ``Σ dyᵀ x``: blocks' products, added exactly as they are formed (`fixed.weight`)."""
    from ..kernels.fixed.weight import FEW, block_sums  # needs Triton

    batch, comm = x.shape[0], layout.cp.comm
    places, of = places_of(layout, batch), by_length(layout, batch)
    dy, x = dy.flatten(0, 1), x.flatten(0, 1)
    known = read.layout is layout
    of_dy, *of_x = _bounds([dy] if known else [dy, x], places, comm)
    if not known:
        read.layout, read.bounds = layout, of_x[0]
    bounds = of_dy, read.bounds
    if comm.size == 1:
        return block_sums(dy, x, of, bounds, weight.dtype)
    blocks = batch * (layout.seq_len // BLOCK + layout.num_documents)  # of all ranks, at most
    wide = torch.float32 if blocks <= FEW else torch.float64
    whole = comm.all_reduce(block_sums(dy, x, of, bounds, wide)).wait()
    return part_of(whole.to(torch.float32), layout, weight)


def _bounds(tensors: list[Tensor], places: Tensor, comm: Any) -> list[Any]:
    """`Bounds` of each. Collective."""
    from ..kernels.fixed.bounds import Bounds, bounds_of, largest_norms, norms_of_blocks, shares_of  # need Triton

    if comm.size == 1:
        return [bounds_of(t, places) for t in tensors]
    norms = [norms_of_blocks(t, places) for t in tensors]
    sizes = [n.shape[1] for n in norms]
    whole = comm.all_reduce(torch.cat([largest_norms(n) for n in norms]), dist.ReduceOp.MAX).wait().split(sizes)
    largest = [m.clone() for m in whole]  # each on a boundary of its own
    shares = comm.all_reduce(torch.cat([shares_of(n, m) for n, m in zip(norms, largest)])).wait().split(sizes)
    return [Bounds(m, s.clone()) for m, s in zip(largest, shares)]


def _places(x: Tensor, layout: ShardedLayout) -> list[tuple[int, int, int]]:
    return [(b, *block) for b in range(x.shape[0]) for block in blocks_of(layout)]


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, layout: ShardedLayout) -> Tensor:
    """This rank's part of ``Σ dyᵀ x``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    above = torch.cat([dy.flatten(0, 1), x.flatten(0, 1)], -1).to(wide)
    scale = power_above(largest(above, layout))
    above_y, above_x = scale.split([dy.shape[-1], x.shape[-1]])
    down_y, down_x = (1 / above_y).to(wide), (1 / above_x).to(wide)
    top = torch.full((), 2.0 * BLOCK, dtype=torch.float64, device=x.device)
    total = torch.zeros(weight.shape, dtype=torch.float64, device=x.device)
    for place in _places(x, layout):
        product = (filled(dy, *place)[0].to(wide) * down_y).T @ (filled(x, *place)[0].to(wide) * down_x)
        total += rounded(product, top, OF_BLOCKS)
    whole = layout.cp.comm.all_reduce(total).wait() * above_y[:, None] * above_x
    return part_of(whole, layout, weight)
