"""A recurrence on a split sequence. Forward and backward are the same three moves:

    summarise   each segment's map (A, b) of the state, from this rank's tokens alone
    exchange    an exclusive scan over the segments of all ranks gives the state entering each of mine
    finish      outputs (forward) or gradients (backward) given the entering states

Where kernels exchange states by themselves (`MailboxBorder`), the three are launches of one call of the kernels'.

The gradient of the state obeys ``G_in = Aᵀ G_out + c`` from right to left, with the A of the forward pass kept and c
the gradient this rank's outputs send to its entering state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..kernels import Backward, Inputs, KnownCall
from ..kernels.known import gradients
from ..scan import MailboxBorder
from .exchange import SplitCall, exchanged, exchanged_back
from .seams import Crossing
from .states import entering_states, final_states, initial_gradient, leaving_gradients, without_rows
from .states_in_order import goes_in_order, gradients_in_order, outputs_in_order


class Finished(NamedTuple):
    """What a forward pass gives, and what a backward pass takes of it."""

    o: Tensor
    final: Tensor | None
    S0: Tensor | None
    maps: Sequence[Tensor | None]
    sent: Sequence[Tensor | None]
    saved: tuple[Tensor | None, ...]
    border: MailboxBorder | None


def forward(call: SplitCall, initial_state: Tensor | None, inputs: Inputs, known: KnownCall | None = None) -> Finished:
    """The three moves on this rank's tokens, not recorded."""
    layout = call.layout
    if goes_in_order(call, inputs):
        o, leaving, saved = outputs_in_order(call, initial_state, inputs)
        last = _final(call, leaving, initial_state)
        return Finished(o, last, None, (), (), tuple(saved), None)
    S0 = entering_states(layout, inputs, initial_state)
    crossing: Crossing | None = None if known is None else known.crossing
    crossing = call.crossing(inputs) if crossing is None else crossing
    _, size, border = crossing
    tensors = (*inputs, call.cu_pieces(inputs), S0)
    again = None if known is None else known.ready(tensors, border)
    maps: Sequence[Tensor | None] = ()
    sent: Sequence[Tensor | None] = ()
    if again is not None:
        if border is not None:
            border.begin(size, reverse=False)
        out = again()
        return Finished(out.o, _final(call, out.leaving, initial_state), S0, maps, sent, tuple(out.saved), border)
    local = call.local(inputs, call.mode, call.output_final_state)
    border = border if local.crosses else None
    if call.seams.alone:
        out = local.output(S0)
    elif border is not None:
        border.begin(size, reverse=False)
        out = local.output(S0, border=border)  # type: ignore[arg-type]
    else:
        S0, summary, maps, sent = exchanged(call, local, S0, inputs)
        out = local.output(S0, summary)
    if known is not None:
        known.crossing = crossing
        known.learn(local, tensors)
    final = _final(call, out.leaving, initial_state)
    return Finished(out.o, final, S0, maps, sent, tuple(out.saved), border)


def _final(call: SplitCall, leaving: Tensor, initial_state: Tensor | None) -> Tensor | None:
    if not call.output_final_state:
        return None
    return without_rows(final_states(call.layout, leaving, initial_state), call.layout.packed)


class SplitRecurrence(torch.autograd.Function):
    """Forward and backward of a recurrence on this rank's tokens."""

    @staticmethod
    def forward(ctx, call: SplitCall, known: KnownCall | None, initial_state: Tensor | None, *tensors: Tensor | None):
        done = forward(call, initial_state, Inputs(*tensors), known)
        ctx.border, ctx.final_shape = done.border, None if done.final is None else done.final.shape
        ctx.way_back = call.layout.cp.comm.agreement.way_back()
        ctx.call, ctx.known, ctx.has_initial = call, known, initial_state is not None
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.parts = len(done.maps), len(tensors), len(done.sent)
        ctx.save_for_backward(done.S0, *done.maps, *tensors, *done.sent, *done.saved)
        ctx.set_materialize_grads(False)
        return done.o, done.final

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dfinal: Tensor | None):
        call: SplitCall = ctx.call
        layout = call.layout
        ctx.way_back()
        S0, *rest = ctx.saved_tensors
        transitions, inputs, sent, saved = _cut(rest, ctx.parts)
        inputs = Inputs(*inputs)
        do = torch.zeros_like(inputs.like_output(call.rule)) if do is None else do
        backward = Backward(S0, do, saved, ctx.needs_input_grad[3 + Inputs._fields.index("g")])
        dS_end, begin = None, partial(call.local, inputs, "chunk")
        if call.output_final_state:  # on every rank, used or not: the sum is collective
            dS_end, dfinal = leaving_gradients(layout, inputs, dfinal, ctx.final_shape)
        if goes_in_order(call, inputs):
            grads = gradients_in_order(call, inputs, do, dS_end, saved)
        elif ctx.border is not None:
            ctx.border.begin(call.crossing(inputs).size, reverse=True)
            grads = gradients(ctx.known, begin, inputs, call.cu_pieces(inputs), backward, dS_end, ctx.border)
        elif call.seams.alone:
            grads = gradients(ctx.known, begin, inputs, call.cu_pieces(inputs), backward, dS_end)
        else:
            local = begin()
            dS_end, adjoint = exchanged_back(call, local, backward, dS_end, transitions, sent)
            grads = local.gradients(backward, dS_end, adjoint)
        dinitial = None
        if ctx.has_initial and ctx.needs_input_grad[2]:
            dinitial = initial_gradient(layout, grads.entering, dfinal).to(ctx.initial_dtype)
        return None, None, dinitial, *grads.like(inputs)


def _cut(tensors: list[Tensor | None], lengths: Sequence[int]) -> Iterator[tuple[Tensor | None, ...]]:
    """Runs of these lengths, and the rest."""
    rest = iter(tensors)
    return iter([*(tuple(islice(rest, n)) for n in lengths), tuple(rest)])
