"""What a layout does with tokens, as operators that torch.compile sees: each finds the layout by its number.

ring_la::layout_index     positions, documents, … of this rank's tokens
ring_la::gather           the whole sequence on every rank, and its gradient
ring_la::convert          another split, and back
ring_la::targets          next-token labels
ring_la::sum_over_ranks   a sum without gradients
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import Facts
from .gather import gather_back
from .handle import found
from .operator import SplitOperator


@torch.library.custom_op("ring_la::layout_index", mutates_args=())
def layout_index(number: int, name: str, length: int, device: torch.device) -> Tensor:
    """An int64 tensor ``[length]`` that a layout keeps under the attribute `name`."""
    return getattr(found(number), name).to(device, copy=True)


@layout_index.register_fake
def _(number: int, name: str, length: int, device: torch.device) -> Tensor:
    return torch.empty(length, dtype=torch.int64, device=device)


def _gather(x: Tensor, number: int, dim: int, length: int) -> Tensor:
    return found(number).gather(x, dim)


def _gather_back(
    grads: Sequence[Tensor], wanted: Sequence[bool], x: Tensor, number: int, dim: int, length: int
) -> list[Tensor]:
    layout = found(number)
    layout.agree("the backward pass of gather", (("dim", dim), ("gradient", Facts.of(grads[0]))), None)
    return [gather_back(grads[0].movedim(dim, 0), layout, layout.cp.comm).movedim(0, dim)]


def _convert(x: Tensor, number: int, other: int, dim: int, length: int) -> Tensor:
    return found(number).convert(x, found(other), dim)


def _convert_back(
    grads: Sequence[Tensor], wanted: Sequence[bool], x: Tensor, number: int, other: int, dim: int, length: int
) -> list[Tensor]:
    return [found(other).convert(grads[0], found(number), dim)]


def _of_length(x: Tensor, *arguments: int) -> Tensor:
    """Like x, but for its length along a dimension: the last two arguments."""
    dim, length = arguments[-2:]
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


gather = SplitOperator("gather", _gather, _of_length, 1, _gather_back)
convert = SplitOperator("convert", _convert, _of_length, 1, _convert_back)


@torch.library.custom_op("ring_la::targets", mutates_args=())
def targets(ids: Tensor, number: int, ignore_index: int, dim: int) -> Tensor:
    return found(number).targets(ids, ignore_index, dim)


@torch.library.custom_op("ring_la::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, number: int) -> Tensor:
    """The sum over the ranks of the ContextParallel of that number."""
    return found(number).sum_over_ranks(x)


@targets.register_fake
def _(ids: Tensor, number: int, ignore_index: int, dim: int) -> Tensor:
    return ids.new_empty(ids.shape)


@sum_over_ranks.register_fake
def _(x: Tensor, number: int) -> Tensor:
    return x.new_empty(x.shape)
