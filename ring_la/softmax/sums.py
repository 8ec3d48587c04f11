"""Running sums that ride as further channels of q and k, so that every exchange and kernel takes them along.

    q_i, c_i / r, 1 / r      k_j, 1, −c_j      r qᵀk + c_i − c_j,   r a power of two near the scale

In bf16 and fp16 a sum is three channels, the parts of it that the dtype holds; scores add them up in fp32. The gradient
of c is Σ_j ds_ij − Σ_i ds_ji, two sums that nearly cancel in the next step, a sum along the document. So kernels that
are told where the sums stand (`Scores.sums`) give each in fp32, in as many parts as the sum itself has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .merging import Sum, wide
from .scores import Scores

PARTS = {torch.float16: 3, torch.bfloat16: 3, torch.float32: 2, torch.float64: 1}
"""Channels that hold a sum of fp64 (of fp16, within 65504)."""
WIDTH = 8
"""Heads are widened to a multiple of this: kernels want it."""


def with_sums(q: Tensor, k: Tensor, c: Tensor, scale: float, exact: bool = False) -> tuple[Tensor, Tensor, float]:
    """q and k ``[B, T, H, K]`` with the sums ``c [B, T, H]`` as further channels, and the scale of their product.

    Args:
        exact: the kernel is told of the sums, and gives their gradient in parts; else it is that of the first part of
            k's, and what a query's own sum gives is left out: 0, but for a gradient of lse.
    """
    near = 2.0 ** round(math.log2(abs(scale))) if scale else 1.0  # sums are divided by it without an error
    parts = _Parts.apply(c, q.dtype) if exact else _first_part(c, q.dtype)
    ones = torch.ones_like(parts) / near
    channels = q.shape[-1] + 2 * parts.shape[-1]
    rest = q.new_zeros(*q.shape[:3], width_with_sums(q.shape[-1], q.dtype) - channels)
    own = _Parts.apply(c, q.dtype) if exact else parts.detach()  # apart: gradients of both would be added in q's dtype
    wide_q = torch.cat([q if near == scale else q * (scale / near), own / near, ones, rest], -1)
    wide_k = torch.cat([k, torch.ones_like(parts), -parts, rest], -1)
    return wide_q, wide_k, near


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


def added(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """What sums add to ``qᵀk``, which the scale multiplies: wide ``[B, H, Tq]`` of queries, ``[B, H, Tk]`` of keys."""
    of_q, of_k = q[..., _of_queries(scores.sums, q.dtype)], k[..., _of_keys(scores.sums, k.dtype)]
    of_q, of_k = (x.to(wide(x.dtype)).sum(-1).transpose(1, 2) for x in (of_q, of_k))
    return of_q.contiguous(), (of_k / scores.scale).contiguous()


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
