"""What ring_la's autograd Functions share: first derivatives, taken backwards, and a place outside compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import SecondDerivativeError, UnsupportedError

outside_graphs = torch._disable_dynamo
"""Decorator: a caller under torch.compile breaks its graph here, at the exchange. Unlike torch.compiler.disable it does
not import the compiler."""


def traced(*tensors: object) -> bool:
    """Whether anything (a compiler, a mode, a function transform, a subclass) looks at single operators of these; None
    is no tensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter and x is not None:
            return True
    return _functorch().peek_interpreter_stack() is not None


def wanting(*tensors: Tensor | None) -> bool:
    """Whether gradients of any of these are wanted."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def bare(*tensors: Tensor | None) -> bool:
    """Whether a call on these, of which the first is there, needs nothing of an operator's dispatch, which takes the
    host longer than a launch: nothing traces, and no gradient is wanted."""
    return not wanting(*tensors) and not traced(tensors[0])


def transformed() -> bool:
    """Whether something differentiates forwards (torch.func.jvp, torch.autograd.forward_ad), or is one of torch.func's
    other transforms."""
    return forward_ad._current_level >= 0 or _in_functorch()


def refuse_transforms(named: Iterable[tuple[str, object]]) -> None:
    """Refuse derivatives that operators do not have: forward-mode ones, where PyTorch drops a tangent and says nothing,
    and those of torch.func, which go through no operator. torch.vmap without gradients does."""
    if not transformed():
        return
    for name, t in named:
        for x in _levels(t):
            if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
                raise UnsupportedError(name, "no tangent of forward-mode differentiation", "one", _INSTEAD)
            if x.requires_grad and torch.is_grad_enabled() and _in_functorch():
                raise UnsupportedError(name, "no gradient within a transform of torch.func", "one", _INSTEAD)


_INSTEAD = "Differentiate backwards (torch.autograd.grad), or take ring_la.reference"


def _in_functorch() -> bool:
    return not torch.compiler.is_compiling() and _functorch().peek_interpreter_stack() is not None


def _functorch() -> Any:
    return torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def _levels(t: Any) -> Iterator[Any]:
    """A tensor as each transform of torch.func around it sees it, but for batched ones, which hide what they are."""
    if not isinstance(t, Tensor):
        return
    wrapped = _functorch()
    while wrapped.is_functorch_wrapped_tensor(t):
        if not wrapped.is_batchedtensor(t):
            yield t
        t = wrapped.get_unwrapped(t)
    yield t


def full_precision(*tensors: Tensor | None) -> AbstractContextManager:
    """Autocast off on the device of the first of these that is there: states and what feeds them keep their dtype."""
    for t in tensors:
        if t is not None:
            kind = t.device.type
            tracing = torch.compiler.is_compiling()  # it cannot ask
            if tracing or (_has_autocast(kind) and torch.is_autocast_enabled(kind)):
                return torch.autocast(kind, enabled=False)
            break
    return _AS_IT_IS


_AS_IT_IS = nullcontext()
_has_autocast = functools.cache(torch.amp.is_autocast_available)


def first_derivative_only(backward: Callable) -> Callable:
    """A Function's backward that runs without recording or autocast, and refuses to be differentiated itself.

    With ``create_graph=True`` the gradients come out as usual; a backward through them raises
    `SecondDerivativeError`.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        if not torch.is_grad_enabled():
            with full_precision(*grads):
                return backward(ctx, *grads)
        with torch.no_grad(), full_precision(*grads):
            out = backward(ctx, *grads)
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
