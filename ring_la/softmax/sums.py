"""Running sums that ride as further channels of q and k, so that every exchange and kernel takes them along.

    q_i, c_i, 1      k_j, 1, −c_j      qᵀk + c_i − c_j,   c = Σ g / scale

In bf16 and fp16 a sum is three channels, the parts of it that the dtype holds; scores add them up in fp32. The gradient
of c is Σ_j ds_ij − Σ_i ds_ji, two sums that nearly cancel in the next step, a sum along the document. So kernels that
are told where the sums stand (`Scores.sums`) give each in fp32, in as many parts as the sum itself has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import first_derivative_only, traced
from ..kernels.fused.operator import kernels_of
from .merging import Sum

PARTS = {torch.float16: 3, torch.bfloat16: 3, torch.float32: 2, torch.float64: 1}
"""Channels that hold a sum of fp64 (of fp16, within 65504)."""
WIDTH = 8
"""Heads are widened to a multiple of this: kernels want it."""


def with_sums(q: Tensor, k: Tensor, c: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    """q and k ``[B, T, H, K]`` with sums ``c [B, T, H]``, fp64, as further channels; scores are ``scale (qᵀk + c_i −
    c_j)``.

    Args:
        exact: the kernel is told of the sums, and gives their gradient in parts; else it is that of the first part of
            k's, and what a query's own sum gives is left out: 0, but for a gradient of lse.
    """
    if exact and kernels_of("sum_channels", q, k) is not None and not traced(q):
        return _Widened.apply(q, k, c)
    parts = _Parts.apply(c, q.dtype) if exact else _first_part(c, q.dtype)
    ones = torch.ones_like(parts)
    rest = q.new_zeros(*q.shape[:3], width_with_sums(q.shape[-1], q.dtype) - q.shape[-1] - 2 * parts.shape[-1])
    own = _Parts.apply(c, q.dtype) if exact else parts.detach()  # apart: gradients of both would be added in q's dtype
    return torch.cat([q, own, ones, rest], -1), torch.cat([k, ones, -parts, rest], -1)


class _Widened(torch.autograd.Function):
    """`with_sums` by one kernel."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        kernels = kernels_of("sum_channels", q, k)
        assert kernels is not None
        ctx.channels, ctx.dtype = q.shape[-1], c.dtype
        ctx.set_materialize_grads(False)
        return kernels.forward(q, k, c, PARTS[q.dtype], width_with_sums(q.shape[-1], q.dtype))

    @staticmethod
    @first_derivative_only
    def backward(ctx, dq: Tensor | None, dk: Tensor | None):
        dc = None
        for grad, of, sign in ((dq, _of_queries, 1), (dk, _of_keys, -1)):
            if grad is not None:
                one = sign * grad[..., of(ctx.channels, grad.dtype)].to(ctx.dtype).sum(-1)
                dc = one if dc is None else dc + one
        return *(None if grad is None else grad[..., : ctx.channels] for grad in (dq, dk)), dc


def width_with_sums(channels: int, dtype: torch.dtype) -> int:
    """Channels of a key of so many with its sums."""
    wide = channels + 2 * PARTS[dtype]
    return wide + (-wide % WIDTH if dtype.itemsize < 8 else 0)


def sums_of(k: Tensor, channels: int) -> Tensor:
    """The sums, fp64, that ride behind the first `channels` channels of keys."""
    return -k[..., _of_keys(channels, k.dtype)].double().sum(-1)


def held_sums(c: Tensor, dtype: torch.dtype) -> Tensor:
    """What keys of a dtype hold of sums, fp64."""
    return in_parts(c, dtype).double().sum(-1)


def in_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Wide numbers ``[…]`` as numbers ``[…, n]`` of a dtype that add up to them."""
    parts, left = [], x.detach()
    for _ in range(PARTS[dtype]):
        parts.append(left.to(dtype))
        left = left - parts[-1].to(left.dtype)
    return torch.stack(parts, -1)


class _Parts(torch.autograd.Function):
    """`in_parts`, whose gradients are parts of one number."""

    @staticmethod
    def forward(ctx, c: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = c.dtype
        return in_parts(c, dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.double().sum(-1).to(ctx.dtype), None


def _first_part(c: Tensor, dtype: torch.dtype) -> Tensor:
    """`in_parts`, of which the first one has the gradient."""
    first = c.to(dtype)
    return torch.cat([first[..., None], in_parts(c, dtype)[..., 1:]], -1)


# -- what kernels and plans do with them -----------------------------------------------------------------------


def _of_queries(sums: int, dtype: torch.dtype) -> slice:
    return slice(sums, sums + PARTS[dtype])


def _of_keys(sums: int, dtype: torch.dtype) -> slice:
    return slice(sums + PARTS[dtype], sums + 2 * PARTS[dtype])


def put(
    gradients: tuple[Tensor | None, Tensor | None], of_sums: tuple[Tensor | None, Tensor | None], sums: int
) -> None:
    """Write the gradients of sums, wide ``[B, T, H]``, into the channels of dq and dk behind their `sums` ones; None:
    not of these."""
    for grad, x, of in zip(gradients, of_sums, (_of_queries, _of_keys)):
        if grad is not None and x is not None:
            grad[..., sums:] = 0
            grad[..., of(sums, grad.dtype)] = in_parts(x, grad.dtype)


def keep_first(dq: Tensor, dk: Tensor, sums: int, dtype: torch.dtype) -> None:
    """Of gradients that are whole in every channel of a sum of some dtype, the first one alone."""
    for grad, at in ((dq, _of_queries(sums, dtype)), (dk, _of_keys(sums, dtype))):
        grad[..., at.start + 1 : at.stop] = 0


def found(gradients: tuple[Sum, Sum], dtype: torch.dtype, sums: int) -> tuple[Tensor, Tensor]:
    """What `put` has written, of sums of dq and dk that have not been rounded yet."""
    of_q, of_k = (g.over_columns(of(sums, dtype)) for g, of in zip(gradients, (_of_queries, _of_keys)))
    return of_q, of_k
