"""The linear recurrence as a registered operator, so that torch.compile and export see one opaque node.

    ring_la::linear_recurrence            (tokens, entering states) -> (o, leaving states)
    ring_la::linear_recurrence_backward   their gradients
    ring_la::linear_recurrence_in_place   the same outputs, the leaving states written over the entering ones

Registered at import with fakes, on every device, without Triton; kernels are imported when first run. Arguments are the
fields of `Inputs` and of what else a call has; the schemas are read from these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algebra import Rule
from ..autograd import traced
from ..errors import SecondDerivativeError
from ..schemas import declared, taken_apart
from .choice import make_local
from .protocol import PLAIN, Backward, Inputs, Local, OutputUse


class ForwardOthers(NamedTuple):
    """What a call has beside its inputs.

    Attributes:
        S0: the states that enter ``[B, N, H, K, V]``. cu: the pieces' offsets ``[N+1]``.
    """

    S0: Tensor | None
    cu: Tensor | None
    rule: str
    scale: float
    mode: str
    backend: str | None


class BackwardOthers(NamedTuple):
    """The same of the call of its gradients; `gate`: whether g's is wanted."""

    S0: Tensor | None
    cu: Tensor | None
    rule: str
    scale: float
    backend: str | None
    gate: bool


class InPlaceOthers(NamedTuple):
    """The same of a call that overwrites `state` ``[B, N, H, K, V]``. `form` is the mode: torch's functionalisation
    cannot pass on an argument of that name."""

    state: Tensor
    cu: Tensor | None
    rule: str
    scale: float
    form: str
    backend: str | None


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """States are fp32; fp64 where any tensor is."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def _local(inputs: Inputs, call: ForwardOthers | InPlaceOthers, mode: str, use: OutputUse = PLAIN) -> Local:
    return make_local(Rule.parse(call.rule), inputs, call.cu, call.scale, mode, call.backend, use)


def _empty_output(inputs: Inputs, rule: str) -> Tensor:
    like = inputs.like_output(Rule.parse(rule))
    return like.new_empty(like.shape)


# -- forward -------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """One device's tokens: o ``[B,T,H,V]`` and the states leaving the pieces ``[B,N,H,K,V]``; see `protocol.Local`."""
    inputs, call = taken_apart(arguments, Inputs, ForwardOthers)
    out = _local(inputs, call, call.mode).output(call.S0)
    assert out.leaving is not None
    return out.o.contiguous(), out.leaving.contiguous()


linear_recurrence = torch.library.custom_op(
    "ring_la::linear_recurrence",
    _forward,
    mutates_args=(),
    schema=f"({declared(Inputs, ForwardOthers)}) -> (Tensor, Tensor)",
)


@linear_recurrence.register_fake
def _(*arguments):
    inputs, call = taken_apart(arguments, Inputs, ForwardOthers)
    pieces = 1 if call.cu is None else call.cu.shape[0] - 1
    states = inputs.q.new_empty((inputs.q.shape[0], pieces, *inputs.state), dtype=state_dtype(*inputs))
    return _empty_output(inputs, call.rule), states


# -- gradients -----------------------------------------------------------------------------------------------


def _wanted(inputs: Inputs, gate: bool) -> Inputs:
    """The inputs whose gradients are made."""
    return inputs if gate else inputs._replace(g=None)


def _gradients(do: Tensor, dS_end: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Gradients of the tensors that are present, in order, the entering states last; not `gate`: but g's."""
    inputs, call = taken_apart(arguments, Inputs, BackwardOthers)
    local = make_local(Rule.parse(call.rule), inputs, call.cu, call.scale, "chunk", call.backend)
    grads, dS0 = local.gradients(Backward(call.S0, do, gate=call.gate), dS_end)
    present = [(x, d) for x, d in zip(_wanted(inputs, call.gate), grads) if x is not None]
    found = [torch.zeros_like(x) if d is None else d.to(x.dtype).contiguous() for x, d in present]
    return found + ([] if dS0 is None else [dS0.contiguous()])


linear_recurrence_backward = torch.library.custom_op(
    "ring_la::linear_recurrence_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dS_end, {declared(Inputs, BackwardOthers)}) -> Tensor[]",
)


@linear_recurrence_backward.register_fake
def _(do, dS_end, *arguments):
    inputs, call = taken_apart(arguments, Inputs, BackwardOthers)
    states = [] if call.S0 is None else [call.S0.new_empty(call.S0.shape, dtype=state_dtype(*inputs))]
    return [x.new_empty(x.shape) for x in _wanted(inputs, call.gate) if x is not None] + states


def _setup(ctx, inputs, output) -> None:
    x, call = taken_apart(inputs, Inputs, ForwardOthers)
    ctx.rule, ctx.scale, ctx.backend = call.rule, call.scale, call.backend
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*x, call.S0, call.cu)


def _backward(ctx, do: Tensor | None, dS_end: Tensor | None):
    *tensors, S0, cu = ctx.saved_tensors
    inputs, gate = Inputs(*tensors), ctx.needs_input_grad[Inputs._fields.index("g")]
    if do is None:
        do = torch.zeros_like(inputs.like_output(Rule.parse(ctx.rule)))
    call = BackwardOthers(S0, cu, ctx.rule, ctx.scale, ctx.backend, gate)
    present = iter(linear_recurrence_backward(do, dS_end, *inputs, *call))
    grads = [None if x is None else next(present) for x in _wanted(inputs, gate)]
    dS0 = None if S0 is None else next(present).to(S0.dtype)
    return (*grads, *ForwardOthers(dS0, None, None, None, None, None))


linear_recurrence.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *grads):
    raise SecondDerivativeError(
        "ring_la's linear recurrences have exact first derivatives only; a second derivative was asked for "
        "(create_graph=True and a backward through it)"
    )


linear_recurrence_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)


# -- in place ------------------------------------------------------------------------------------------------


def overwrite(inputs: Inputs, call: InPlaceOthers) -> Tensor:
    """`linear_recurrence` without gradients, whose `state` becomes the one that leaves."""
    out = _local(inputs, call, call.form, OutputUse(in_place=True)).output(call.state)
    assert out.leaving is not None
    if out.leaving.data_ptr() != call.state.data_ptr():
        call.state.copy_(out.leaving)
    return out.o.contiguous()


def _overwrite(*arguments: Any) -> Tensor:
    return overwrite(*taken_apart(arguments, Inputs, InPlaceOthers))


overwrite_op = torch.library.custom_op(
    "ring_la::linear_recurrence_in_place",
    _overwrite,
    mutates_args=("state",),
    schema=f"({declared(Inputs, InPlaceOthers).replace('Tensor state', 'Tensor(a!) state')}) -> Tensor",
)


def linear_recurrence_in_place(inputs: Inputs, call: InPlaceOthers) -> Tensor:
    """`overwrite`, as the registered operator where something traces."""
    return overwrite_op(*inputs, *call) if traced(inputs.q) else overwrite(inputs, call)


@overwrite_op.register_fake
def _(*arguments):
    inputs, call = taken_apart(arguments, Inputs, InPlaceOthers)
    return _empty_output(inputs, call.rule)
