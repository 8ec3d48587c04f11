"""Sums of floats that are exact, so that neither the order nor who adds first changes a bit.

Numbers below 2^e are rounded to multiples of 2^(e + headroom − 52), by adding and taking away 1.5 · 2^(e + headroom) in
fp64; up to 2^headroom of them then add without rounding (Demmel and Nguyen 2015, "Parallel reproducible summation", §3:
pre-rounding with the largest number known). e is the same on every rank, of the largest number there is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..context import ShardedLayout
from .switch import at_once

OF_BLOCKS, OF_TOKENS = 16, 24
"""Headroom: the logarithms of how many blocks, or tokens, a sum may have. What is left keeps 36 or 28 bits."""


def power_above(x: Tensor) -> Tensor:
    """The power of two above each of ``x ≥ 0``, fp64; 1 for 0, and inf or NaN for what is not finite."""
    x = x.to(torch.float64)
    mantissa, _ = torch.frexp(x)
    return torch.where(x == 0, 1.0, 2 * (x / torch.where(x > 0, mantissa, 1)))


def largest(x: Tensor, layout: ShardedLayout) -> Tensor:
    """The largest magnitude over the first dimension and the ranks, of ``x [n, …]``, n ≥ 0. Collective."""
    own = x.abs().amax(0) if len(x) else x.new_zeros(x.shape[1:])
    return layout.cp.comm.all_reduce(own.contiguous(), dist.ReduceOp.MAX).wait()


def rounded(x: Tensor, top: Tensor, headroom: int) -> Tensor:
    """Numbers below `top`, powers of two, as multiples of what sums without rounding; fp64."""
    shift = top * (1.5 * 2**headroom)
    return x.to(torch.float64).add(shift).sub_(shift)


def exact_sum(x: Tensor, layout: ShardedLayout, headroom: int = OF_BLOCKS) -> Tensor:
    """The sum over the first dimension of ``x [n, …]`` and over the ranks, fp64 on every rank; of fp64 numbers with
    what their rounding leaves. Collective."""
    if at_once(x) and x.dtype != torch.float64:
        return _by_kernels(x.reshape(len(x), x.shape[1:].numel()), layout, headroom).view(x.shape[1:])
    top = power_above(largest(x, layout))
    near = rounded(x, top, headroom)
    if x.dtype != torch.float64:
        return layout.cp.comm.all_reduce(near.sum(0)).wait()
    rest = rounded(x - near, top * 2.0 ** (headroom - 52), headroom)
    coarse, fine = layout.cp.comm.all_reduce(torch.stack([near.sum(0), rest.sum(0)])).wait()
    return coarse + fine


def _by_kernels(x: Tensor, layout: ShardedLayout, headroom: int) -> Tensor:
    """The same of ``x [n, D]``, in a launch or two."""
    from ..kernels.fixed.column_sum import column_sums, largest_of_columns, whole_sums  # needs Triton

    comm = layout.cp.comm
    if comm.size == 1:
        return whole_sums(x, headroom)
    top = comm.all_reduce(largest_of_columns(x), dist.ReduceOp.MAX).wait()
    return comm.all_reduce(column_sums(x, top, headroom)).wait()


def part_of(whole: Tensor, layout: ShardedLayout, like: Tensor) -> Tensor:
    """This rank's part of a sum: all of it on the first rank, zero on the others, so that a sum of the parts in any
    order is the sum."""
    return whole.to(like.dtype) if layout.rank == 0 else torch.zeros_like(like)
