"""A function and its gradients as a registered operator, and without its dispatch where nothing needs it.

A step ``x`` is a file ``x.py`` here, with its definition in PyTorch's operations, and its Triton kernels with their
launches are ``x_kernel.py``: `kernels_of` finds them. (Of ``sum_channels`` the definition is `softmax.sums`.)

torch.compile and the like see one opaque node with a fake. Dispatching one takes the host longer than launching a
kernel, so a call that nothing traces is an autograd Function, and one that wants no gradient the function itself.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...autograd import first_derivative_only, traced, wanting
from ...errors import SecondDerivativeError
from ..choice import triton_installed


def fused(x: Tensor) -> bool:
    """Whether steps on tensors like x are single operators: on CUDA, and on the meta device, where what autograd keeps
    is then what it keeps there."""
    return x.is_cuda or x.is_meta


def kernels_of(step: str, *tensors: Tensor) -> ModuleType | None:
    """The module ``{step}_kernel`` where Triton can take such tensors, as its ``unsupported(*tensors)`` says."""
    if not (tensors[0].is_cuda and triton_installed()):
        return None
    kernels = _imported(step)
    return None if kernels.unsupported(*tensors) else kernels


@functools.cache
def _imported(step: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{step}_kernel")


class Operator:
    """``ring_la::name`` and ``ring_la::name_backward``.

    Args:
        forward: of tensors, then of other arguments, all positional and annotated as `torch.library.custom_op` wants
            them; what it returns is contiguous and shares no memory with its arguments.
        backward: of the output's gradient, or a list where there are several (None for one that is not used), then
            of forward's arguments; a list of the gradients of those of the first `wanting` arguments that are given.
        fake: empty tensors shaped like forward's outputs.
        keeps: which of several outputs the backward takes after forward's arguments.
    """

    def __init__(
        self, name: str, forward: Callable, backward: Callable[..., list[Tensor]], fake: Callable, wanting: int,
        keeps: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.forward, self.wanting, self._keeps = forward, wanting, keeps
        self.registered = torch.library.custom_op(f"ring_la::{name}", forward, mutates_args=())
        self.registered.register_fake(fake)
        gradients = torch.library.custom_op(f"ring_la::{name}_backward", backward, mutates_args=())
        count = forward.__code__.co_argcount
        self._several = torch.library.infer_schema(forward, mutates_args=()).rpartition("->")[2].count("Tensor") > 1

        @gradients.register_fake
        def _(*arguments):
            given = arguments[-count - len(keeps) :]
            return [x.new_empty(x.shape) for x in given[:wanting] if x is not None]

        def refuse(ctx, *grads):
            raise SecondDerivativeError(
                f"ring_la::{name} has exact first derivatives only; a second derivative was asked for "
                "(create_graph=True and a backward through it)"
            )

        self.registered.register_autograd(self._backward(gradients), setup_context=self._save)
        gradients.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)
        self._eager = _function(name, forward, self._save, self._backward(backward))

    def __call__(self, *arguments: Any) -> Any:
        if traced(arguments[0]):
            return self.registered(*arguments)
        wanted = wanting(*self._leaves(arguments))
        return self._eager.apply(*arguments) if wanted else self.forward(*arguments)

    def _leaves(self, arguments: Sequence[Any]) -> Sequence[Tensor | None]:
        return arguments[: self.wanting]

    def _backward(self, run: Callable[..., list[Tensor]]) -> Callable:
        def backward(ctx, *grads: Tensor | None):
            saved, others = ctx.saved_tensors, ctx.others
            arguments = [x if t is None else t for t, x in zip(saved, others)]
            given = ([*grads],) if self._several else grads
            found = iter(run(*given, *arguments, *saved[len(others) :]))
            of_leaves = [None if x is None else next(found) for x in self._leaves(arguments)]
            return (*of_leaves, *[None] * (len(arguments) - self.wanting))

        return backward

    def _save(self, ctx, inputs: Sequence[Any], output: Any) -> None:
        ctx.set_materialize_grads(not isinstance(output, tuple))
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*tensors, *[output[i] for i in self._keeps])


def _function(name: str, run: Callable, save: Callable, back: Callable) -> type[torch.autograd.Function]:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            output = run(*arguments)
            save(ctx, arguments, output)
            return output

        backward = staticmethod(first_derivative_only(back))

    Eager.__name__ = Eager.__qualname__ = name
    return Eager
