"""A call among ranks as a registered operator: to a compiler one node, which hides what cannot be traced.

    ring_la::name             tensors, the numbers of handles, flags -> results
    ring_la::name_backward    and gradients of the results -> gradients of the tensors

The node is the eager call, run when the graph runs: with its checks, and with what ranks agree on before they send. So
an error is raised on every rank, as in eager calls. Its gradients are those of the same call, made once more, unless
there is a way back that needs no results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import SecondDerivativeError

Results = Tensor | tuple[Tensor, ...]


class SplitOperator:
    """``ring_la::name`` and ``ring_la::name_backward``.

    Args:
        run: of tensors, then of other arguments, all positional and annotated as `torch.library.custom_op` wants them,
            or as `schema` says; one tensor or a tuple.
        fake: empty tensors shaped like run's results.
        wanting: so many of the first arguments are tensors (or None) that may want gradients.
        back: of the gradients of the results (none is None) and run's arguments, the gradients of the first `wanting`
            ones; None: the call is made once more, and differentiated.
        again: what is made once more in place of `run`: its first results, those that have gradients.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Results],
        fake: Callable,
        wanting: int,
        back: Callable | None = None,
        again: Callable[..., Results] | None = None,
        schema: str | None = None,
    ) -> None:
        self._differentiated, self._wanting, self._back = again or run, wanting, back or self._again
        self._fake = fake
        schema = schema or torch.library.infer_schema(run, mutates_args=())
        arguments = schema[1 : schema.rindex(") ->")]

        def forward(*arguments: Any) -> Results:
            with torch.no_grad():
                return own_memory(run(*arguments), arguments)

        def backward(grads: Sequence[Tensor | None], wanted: Sequence[bool], *arguments: Any) -> list[Tensor]:
            with torch.no_grad():
                found = self._back(self._present(grads, arguments), wanted, *arguments)
                return list(own_memory(tuple(g for g, w in zip(found, wanted) if w), (*grads, *arguments)))

        self._forward = torch.library.custom_op(f"ring_la::{name}", forward, mutates_args=(), schema=schema)
        self._forward.register_fake(fake)
        self._backward = torch.library.custom_op(
            f"ring_la::{name}_backward",
            backward,
            mutates_args=(),
            schema=f"(Tensor?[] grads, bool[] wanted, {arguments}) -> Tensor[]",
        )
        self._backward.register_fake(lambda grads, wanted, *xs: [x.new_empty(x.shape) for x, w in zip(xs, wanted) if w])
        self._forward.register_autograd(self._gradients, setup_context=_save)
        self._backward.register_autograd(_refusal(name), setup_context=lambda ctx, inputs, output: None)

    def __call__(self, *arguments: Any) -> Any:
        return self._forward(*arguments)

    def _gradients(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        arguments = [other if t is None else t for t, other in zip(saved, ctx.others)]
        wanted = list(ctx.needs_input_grad[: self._wanting])
        found = iter(self._backward(list(grads), wanted, *arguments))
        given = [next(found) if w else None for w in wanted]
        return (*given, *[None] * (len(arguments) - self._wanting))

    def _present(self, grads: Sequence[Tensor | None], arguments: Sequence[Any]) -> list[Tensor]:
        """The gradients, zero where a result is not used: the way back is collective whether this rank needs it."""
        present = [g for g in grads if g is not None]
        if len(present) == len(grads):
            return present
        like = self._fake(*arguments)
        like = like if isinstance(like, tuple) else (like,)
        return [x.zero_() if g is None else g for g, x in zip(grads, like)]

    def _again(self, grads: Sequence[Tensor], wanted: Sequence[bool], *arguments: Any) -> list[Tensor | None]:
        """By the eager call, recorded."""
        tensors, rest = arguments[: self._wanting], arguments[self._wanting :]
        leaves = [None if x is None else x.detach().requires_grad_(w) for x, w in zip(tensors, wanted)]
        with _recording():
            out = self._differentiated(*leaves, *rest)
            out = out if isinstance(out, tuple) else (out,)
            used = [(o, g) for o, g in zip(out, grads) if o.requires_grad]
            of = [x for x, w in zip(leaves, wanted) if w and x is not None]
            results, given = zip(*used)
            found = iter(torch.autograd.grad(results, of, given, allow_unused=True, materialize_grads=True))
        return [next(found) if w else None for w in wanted]


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in inputs])


def _refusal(name: str) -> Callable:
    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise SecondDerivativeError(
            f"ring_la::{name} has exact first derivatives only; a second derivative was asked for "
            "(create_graph=True and a backward through it)"
        )

    return refuse


def own_memory(out: Any, given: Sequence[Any]) -> Any:
    """Results as operators return them: contiguous, and no memory of an argument."""
    if isinstance(out, Tensor):
        return own_memory((out,), given)[0]
    taken = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
    own = []
    for x in out:
        x = x.detach().contiguous()
        storage = x.untyped_storage()._cdata
        own.append(x.clone() if storage in taken else x)
        taken.add(own[-1].untyped_storage()._cdata)
    return tuple(own)


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd as it is outside of an operator, within which nothing is recorded."""
    keys, exclude = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
        exclude = exclude.remove(key)
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield
