"""The linear recurrence as a registered operator, so that torch.compile and export see one opaque node.

    ring_la::linear_recurrence            (tokens, entering states) -> (o, leaving states)
    ring_la::linear_recurrence_backward   their gradients
    ring_la::linear_recurrence_in_place   the same outputs, the leaving states written over the entering ones

Registered at import with fakes, on every device, without Triton; kernels are imported when first run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..algebra import Rule
from ..autograd import traced
from ..errors import SecondDerivativeError
from .choice import make_local
from .protocol import Backward, Inputs, OutputUse


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """States are fp32; fp64 where any tensor is."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def _clone_contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


@torch.library.custom_op("ring_la::linear_recurrence", mutates_args=())
def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    S0: Tensor | None,
    cu: Tensor | None,
    rule: str,
    scale: float,
    mode: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """One device's tokens: o ``[B,T,H,V]`` and the states leaving the pieces ``[B,N,H,K,V]``; see `protocol.Local`."""
    local = make_local(Rule.parse(rule), Inputs(q, k, v, g, beta, a, b), cu, scale, mode, backend)
    out = local.output(S0)
    return out.o.contiguous(), out.leaving.contiguous()


@linear_recurrence.register_fake
def _(q, k, v, g, beta, a, b, S0, cu, rule, scale, mode, backend):
    pieces = 1 if cu is None else cu.shape[0] - 1
    inputs = Inputs(q, k, v, g, beta, a, b)
    like, dtype = inputs.like_output(Rule.parse(rule)), state_dtype(*inputs)
    return like.new_empty(like.shape), q.new_empty((q.shape[0], pieces, *inputs.state), dtype=dtype)


@torch.library.custom_op("ring_la::linear_recurrence_backward", mutates_args=())
def linear_recurrence_backward(
    do: Tensor,
    dS_end: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    S0: Tensor | None,
    cu: Tensor | None,
    rule: str,
    scale: float,
    backend: str | None,
    gate: bool = True,
) -> list[Tensor]:
    """Gradients of the tensors that are present, in order, the entering states last; not `gate`: but g's."""
    inputs = Inputs(q, k, v, g, beta, a, b)
    local = make_local(Rule.parse(rule), inputs, cu, scale, "chunk", backend)
    grads, dS0 = local.gradients(Backward(S0, do, gate=gate), dS_end)
    if not gate:
        inputs = inputs._replace(g=None)
    present = [(x, d) for x, d in zip(inputs, grads) if x is not None]
    return [_clone_contiguous(d, x.dtype) for x, d in present] + ([] if S0 is None else [dS0.contiguous()])


@linear_recurrence_backward.register_fake
def _(do, dS_end, q, k, v, g, beta, a, b, S0, cu, rule, scale, backend, gate=True):
    present = [x for x in (q, k, v, g if gate else None, beta, a, b) if x is not None]
    states = [] if S0 is None else [S0.new_empty(S0.shape, dtype=state_dtype(q, k, v, g, beta, a, b))]
    return [x.new_empty(x.shape) for x in present] + states


def _setup(ctx, inputs, output) -> None:
    *tensors, rule, scale, _mode, backend = inputs
    ctx.rule, ctx.scale, ctx.backend = rule, scale, backend
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _backward(ctx, do: Tensor | None, dS_end: Tensor | None):
    *tensors, S0, cu = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(Inputs(*tensors).like_output(Rule.parse(ctx.rule)))
    gate = ctx.needs_input_grad[Inputs._fields.index("g")]
    grads = linear_recurrence_backward(do, dS_end, *tensors, S0, cu, ctx.rule, ctx.scale, ctx.backend, gate)
    wanted = Inputs(*tensors) if gate else Inputs(*tensors)._replace(g=None)
    present = iter(grads)
    full = [None if x is None else next(present) for x in (*wanted, S0)]
    if S0 is not None:
        full[-1] = full[-1].to(S0.dtype)
    return (*full, None, None, None, None, None)


linear_recurrence.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *grads):
    raise SecondDerivativeError(
        "ring_la's linear recurrences have exact first derivatives only; a second derivative was asked for "
        "(create_graph=True and a backward through it)"
    )


linear_recurrence_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)


def overwrite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    state: Tensor,
    cu: Tensor | None,
    rule: str,
    scale: float,
    form: str,
    backend: str | None,
) -> Tensor:
    """`linear_recurrence` without gradients, whose `state` ``[B,N,H,K,V]`` becomes the one that leaves.

    `form` is the mode: torch's functionalisation cannot pass on an argument of that name.
    """
    inputs = Inputs(q, k, v, g, beta, a, b)
    local = make_local(Rule.parse(rule), inputs, cu, scale, form, backend, OutputUse(in_place=True))
    out = local.output(state)
    if out.leaving.data_ptr() != state.data_ptr():
        state.copy_(out.leaving)
    return out.o.contiguous()


overwrite_op = torch.library.custom_op("ring_la::linear_recurrence_in_place", overwrite, mutates_args=("state",))


def linear_recurrence_in_place(q: Tensor, *rest) -> Tensor:
    """`overwrite`, as the registered operator where something traces."""
    return (overwrite_op if traced(q) else overwrite)(q, *rest)


@overwrite_op.register_fake
def _(q, k, v, g, beta, a, b, state, cu, rule, scale, form, backend):
    like = Inputs(q, k, v, g, beta, a, b).like_output(Rule.parse(rule))
    return like.new_empty(like.shape)
