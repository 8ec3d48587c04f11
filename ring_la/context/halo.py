"""Slices next to a rank's own, on their way: posted, waited for, and sent back as gradients, neither at once.

Two autograd Functions around whatever runs in between. Forward, the first posts and the second waits; backward, the
second posts and the first waits, so that the gradients of what ran in between are taken while messages travel. They are
linked by an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import first_derivative_only, outside_graphs
from ..comm import Pending, Route
from ..errors import ArgumentError


class Halo:
    """An exchange under way; made by `GridLayout.halo`."""

    def __init__(self, x: Tensor, dim: int, width: tuple[int, int], route: Route) -> None:
        self._dim, self._width = dim, width
        self._way = _Way(route)
        self._link = _Post.apply(x.movedim(dim, 0), self._way)
        self._came: tuple[Tensor, Tensor] | None = None

    @outside_graphs
    def wait(self) -> tuple[Tensor, Tensor]:
        """The slices before and after, zeros beyond the grid: ``[..., width, ...]`` each."""
        if self._came is None:
            before, after = _Wait.apply(self._link, self._way).movedim(0, self._dim).split(self._width, self._dim)
            self._came = before, after
        return self._came


class Arrived:
    """An exchange that has ended, as compiled graphs have them."""

    def __init__(self, before: Tensor, after: Tensor) -> None:
        self._came = before, after

    def wait(self) -> tuple[Tensor, Tensor]:
        """The slices before and after."""
        return self._came


class _Way:
    """What the two Functions share: the messages that are under way."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.coming: Pending | None = None
        self.returning: Pending | None = None


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.coming = way.route.start(x)
        return x.new_empty(0)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, _grad: Tensor) -> Any:
        returning, ctx.way.returning = ctx.way.returning, None
        return returning.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, way: _Way) -> Tensor:
        ctx.way, ctx.way_back = way, way.route.group.agreement.way_back()
        coming, way.coming = way.coming, None
        return coming.wait()  # type: ignore[union-attr]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.way_back()
        ctx.way.returning = ctx.way.route.start_back(grad.contiguous())
        return grad.new_empty(0), None


def check_width(width: object) -> tuple[int, int]:
    """(before, after) of a width that was given."""
    both = (width, width) if isinstance(width, int) else width
    numbers = isinstance(both, tuple) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in both)
    if not isinstance(both, tuple) or len(both) != 2 or not numbers:
        raise ArgumentError("width", "an int >= 0, or two of them", repr(width))
    return both
