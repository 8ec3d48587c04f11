"""The whole sequence from its parts, with its gradient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..comm import Group


class Ownership(Protocol):
    """Which rank has which rows: a `Layout`, or the blocks of one."""

    world_size: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each rank."""
        ...

    @property
    def local_length(self) -> int:
        """Rows of this rank."""
        ...

    @property
    def order(self) -> Tensor:
        """The place in the whole of rank 0's rows, then rank 1's, …: int64."""
        ...


class Gather(torch.autograd.Function):
    """All ranks' rows, in sequence order; the gradient is summed over ranks and cut again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Ownership, comm: Group) -> Tensor:
        ctx.layout, ctx.comm, ctx.way_back = layout, comm, comm.agreement.way_back()
        longest = max(layout.lengths)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = comm.all_gather(padded).wait()
        rows = torch.cat([part[:n] for part, n in zip(parts, layout.lengths)])
        out = torch.empty_like(rows)
        out[layout.order.to(x.device)] = rows
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.way_back()
        return gather_back(grad, ctx.layout, ctx.comm), None, None


def gather_back(grad: Tensor, layout: Ownership, comm: Group) -> Tensor:
    """The gradient of this rank's rows, from every rank's of the whole sequence ``[seq_len, …]``."""
    rows = grad[layout.order.to(grad.device)].split(list(layout.lengths))
    padded = grad.new_zeros(layout.world_size, max(layout.lengths), *grad.shape[1:])
    for part, row in zip(padded, rows):
        part[: len(row)] = row
    return comm.all_to_all(padded).wait().sum(0)[: layout.local_length]
