"""What code by element is made of where it is not by element (see `by_element`). Such code is one call on all tokens
under a deterministic layout (`written_out`), and elsewhere these are PyTorch's operations.

    per_token   what tokens share, written out for each of them: its gradient is summed over them exactly
    row_sum     the sum within a row, by one order whatever rows there are
    over        a number a row, written out over it: the same the other way
    repeated    heads written out for the heads that share them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..context import ShardedLayout
from .sums import OF_TOKENS, exact_sum, part_of

_written_out = False
"""Whether such a call is on its way."""


@contextmanager
def written_out() -> Iterator[None]:
    """Around code by element on all tokens at once."""
    global _written_out
    before, _written_out = _written_out, True
    try:
        yield
    finally:
        _written_out = before


def per_token(shared: Sequence[Tensor | None], x: Tensor, layout: ShardedLayout) -> list[Tensor | None]:
    """Tensors ``[…]`` that all tokens of ``x [B, T, …]`` share as ``[B, T, …]``, where they want gradients."""
    wanted = [t for t in shared if t is not None and t.requires_grad]
    if not (wanted and torch.is_grad_enabled()):
        return [*shared]
    out = iter(_PerToken.apply(layout, tuple(x.shape[:2]), *wanted))
    return [next(out) if t is not None and t.requires_grad else t for t in shared]


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: ShardedLayout, tokens: tuple[int, int], *shared: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.count, ctx.way_back = layout, tokens[0] * tokens[1], layout.cp.comm.agreement.way_back()
        ctx.save_for_backward(*shared)
        return tuple(t.expand(*tokens, *t.shape) for t in shared)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.way_back()
        shared = ctx.saved_tensors
        rows = torch.cat([g.reshape(ctx.count, t.numel()) for g, t in zip(grads, shared)], 1)
        whole = exact_sum(rows, ctx.layout, OF_TOKENS).split([t.numel() for t in shared])
        return None, None, *(part_of(s.view(t.shape), ctx.layout, t) for s, t in zip(whole, shared))


def row_sum(x: Tensor) -> Tensor:
    """``Σ_d x[…, d]`` as ``[…, 1]``, in fp32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return _RowSum.apply(x) if _written_out and x.dtype == torch.float32 else x.sum(-1, keepdim=True)


def over(x: Tensor, size: int) -> Tensor:
    """``x [..., 1]`` as ``[..., size]``."""
    wide = (*x.shape[:-1], size)
    return _Over.apply(x, wide) if _written_out and x.dtype == torch.float32 else x.expand(wide)


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from ..kernels.fixed.row_sum import sum_rows  # needs Triton

        ctx.shape = x.shape
        return sum_rows(x)[..., None]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


class _Over(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wide: tuple[int, ...]) -> Tensor:
        return x.expand(wide)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        from ..kernels.fixed.row_sum import sum_rows  # needs Triton

        return sum_rows(grad.float())[..., None], None


def repeated(x: Tensor, count: int) -> Tensor:
    """Heads ``[B, T, H, …]`` so many times each, one beside the other."""
    if count == 1:
        return x
    return _Repeated.apply(x, count) if _written_out else x.repeat_interleave(count, 2)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x.repeat_interleave(count, 2)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, *others = grad.unflatten(2, (-1, ctx.count)).unbind(3)
        for other in others:
            first = first + other
        return first, None
