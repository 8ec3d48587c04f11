"""What ring_la's autograd Functions share: first derivatives only, and a place outside compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import SecondDerivativeError

outside_graphs = torch._disable_dynamo
"""Decorator: a caller under torch.compile breaks its graph here, at the exchange. Unlike torch.compiler.disable it does
not import the compiler."""


def first_derivative_only(backward: Callable) -> Callable:
    """A Function's backward that runs without recording and refuses to be differentiated itself.

    With ``create_graph=True`` the gradients come out as usual; a backward through them raises
    `SecondDerivativeError`.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        recording = torch.is_grad_enabled()
        with torch.no_grad():
            out = backward(ctx, *grads)
        if not recording:
            return out
        single = not isinstance(out, tuple)
        wrapped = tuple(_refusing(x) for x in ((out,) if single else out))
        return wrapped[0] if single else wrapped

    return once


def _refusing(x: Tensor | None) -> Tensor | None:
    """`x`, part of a graph whose backward raises."""
    return None if x is None else _Refuse.apply(x.detach().requires_grad_())


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise SecondDerivativeError(
            "ring_la's operators have exact first derivatives only; a second derivative was asked for "
            "(create_graph=True and a backward through the gradient)"
        )
