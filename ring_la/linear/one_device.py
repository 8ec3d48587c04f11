"""A recurrence on one device: the registered operator where something traces the call, else an autograd Function."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..algebra import Rule
from ..autograd import first_derivative_only, full_precision, traced, wanting
from ..kernels import Backward, ForwardOthers, Inputs, KnownCall, Output, OutputUse, linear_recurrence, make_local
from ..kernels.known import gradients


class OneDeviceCall(NamedTuple):
    """Everything about a call but its tensors."""

    rule: Rule
    scale: float
    mode: str
    backend: str | None
    final: bool
    known: KnownCall | None = None

    def output(self, inputs: Inputs, S0: Tensor | None, cu: Tensor | None, use: OutputUse) -> Output:
        """The forward pass, as one of its kind was done before if that is known."""
        known, tensors = self.known, (*inputs, cu, S0)
        again = None if known is None else known.ready(tensors)
        if again is not None:
            return again()
        local = make_local(self.rule, inputs, cu, self.scale, self.mode, self.backend, use)
        out = local.output(S0)
        if known is not None:
            known.learn(local, tensors)
        return out


def one_device(
    call: OneDeviceCall, inputs: Inputs, S0: Tensor | None, cu: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """o and the states leaving the pieces, if `call.final`. What traces the call sees the registered operator; an eager
    one spares its dispatch, and its backward has what the forward made."""
    if traced(inputs.q) or inputs.q.shape[1] == 0:
        rule, scale, mode, backend, *_ = call
        return linear_recurrence(*inputs, *ForwardOthers(S0, cu, str(rule), scale, mode, backend))
    with full_precision(inputs.q):
        if wanting(*inputs, S0):
            return OneDeviceRecurrence.apply(call, cu, S0, *inputs)
        out = call.output(inputs, S0, cu, OutputUse(final=call.final))
        return out.o, out.leaving


class OneDeviceRecurrence(torch.autograd.Function):
    """`linear_recurrence` and its gradients for eager calls."""

    @staticmethod
    def forward(ctx, call: OneDeviceCall, cu: Tensor | None, S0: Tensor | None, *tensors: Tensor | None):
        out = call.output(Inputs(*tensors), S0, cu, OutputUse(saved=True, final=call.final, alone=True))
        ctx.call = call
        ctx.save_for_backward(cu, S0, *tensors, *out.saved)
        ctx.set_materialize_grads(False)
        return out.o, out.leaving if call.final else None

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dS_end: Tensor | None):
        call = ctx.call
        rule, scale, _, backend, *_ = call
        cu, S0, *rest = ctx.saved_tensors
        width = len(Inputs._fields)
        inputs, saved = Inputs(*rest[:width]), tuple(rest[width:])
        do = torch.zeros_like(inputs.like_output(rule)) if do is None else do
        gate = ctx.needs_input_grad[3 + Inputs._fields.index("g")]
        use = OutputUse(saved=True, final=call.final, alone=True)
        begin = partial(make_local, rule, inputs, cu, scale, "chunk", backend, use)
        grads = gradients(call.known, begin, inputs, cu, Backward(S0, do, saved, gate), dS_end)
        return None, None, None if S0 is None else grads.entering.to(S0.dtype), *grads.like(inputs)
