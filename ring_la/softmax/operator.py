"""Softmax attention on one device as a registered operator, so that torch.compile and export see one opaque node.

    ring_la::attention            tensors -> (o, lse)
    ring_la::attention_backward   their gradients

Registered at import with fakes, on every device; kernels are imported when first run. Arguments are the fields of
`Tensors` and `Scores`, and what else a call on one device has; the schemas are read from these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from ..choices import LatentForm
from ..context.operator import own_memory
from ..errors import SecondDerivativeError
from ..schemas import declared, taken_apart
from .call import AttentionCall
from .merging import wide
from .plan import Saved
from .scores import Scores
from .tensors import Tensors


class WholeOthers(NamedTuple):
    """What a call on one device has beside tensors and scores."""

    joint: str
    backend: str | None
    cu_seqlens: Tensor | None
    form: LatentForm | None


def flat(x: Tensors, call: AttentionCall) -> tuple:
    """A call's arguments as the operator takes them."""
    return (*x, *call.scores, *WholeOthers(call.joint, call.backend, call.cu_seqlens, call.form))


def _call_of(arguments: Iterable) -> tuple[Tensors, AttentionCall]:
    """What `flat` has taken apart."""
    x, scores, others = taken_apart(arguments, Tensors, Scores, WholeOthers)
    return x, AttentionCall(scores, **others._asdict())


ARGUMENTS = declared(Tensors, Scores, WholeOthers)


def _forward(*arguments) -> tuple[Tensor, Tensor]:
    """One device's attention: o ``[B, Tq, H, V]`` and lse ``[B, H, Tq]``."""
    x, call = _call_of(arguments)
    o, lse, _ = call.plan(x).forward(x)
    return o, lse


attention = torch.library.custom_op(
    "ring_la::attention", _forward, mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)"
)


@attention.register_fake
def _(*arguments):
    x, _ = _call_of(arguments)
    B, T, H, _ = x.q.shape
    return x.q.new_empty((B, T, H, x.value_width)), x.q.new_empty((B, H, T), dtype=wide(x.q.dtype))


def _gradients(do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, *arguments) -> list[Tensor]:
    """Gradients of the tensors that are present, in order."""
    x, call = _call_of(arguments)
    grads = call.plan(x).backward(Saved(x, o, lse), do, dlse)
    return list(own_memory([g for g in grads if g is not None], (do, dlse, o, lse, *arguments)))


attention_backward = torch.library.custom_op(
    "ring_la::attention_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, {ARGUMENTS}) -> Tensor[]",
)


@attention_backward.register_fake
def _(do, dlse, o, lse, *arguments):
    return [t.new_empty(t.shape) for t in _call_of(arguments)[0].differentiable if t is not None]


def differentiable(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Give an operator of `Tensors` and other arguments its gradients: `backward` of the gradients of its two results,
    of these, and of its arguments."""
    width = len(Tensors._fields)

    def save(ctx, inputs, output) -> None:
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in inputs))

    def gradients(ctx, do: Tensor | None, dlse: Tensor | None):
        o, lse, *tensors = ctx.saved_tensors
        arguments = [other if t is None else t for t, other in zip(tensors, ctx.others)]
        present = iter(backward(do, dlse, o, lse, *arguments))
        grads = [None if t is None else next(present) for t in Tensors(*arguments[:width]).differentiable]
        return (*grads, *[None] * (len(arguments) - len(grads)))

    def refuse(ctx, *grads):
        raise SecondDerivativeError(
            "ring_la.attention has exact first derivatives only; a second derivative was asked for "
            "(create_graph=True and a backward through it)"
        )

    forward.register_autograd(gradients, setup_context=save)
    backward.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)


differentiable(attention, attention_backward)
