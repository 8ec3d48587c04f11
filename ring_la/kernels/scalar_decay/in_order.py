"""The passes under a scalar decay or none over pieces of one span each (see `kernels.in_order`)."""

from __future__ import annotations

from torch import Tensor

from ring_la.kernels.protocol import Backward, InputGradients, Output
from ring_la.kernels.scalar_decay.attend import Left, Roles, attend
from ring_la.kernels.scalar_decay.operands import chunk_states, gates_of
from ring_la.kernels.scalar_decay.recurrence import ScalarDecayRecurrence, ScalarDecaySaved
from ring_la.kernels.spans.crossing import Entered


def forward(local: ScalarDecayRecurrence, S0: Tensor | None) -> Output:
    """o and the states that leave the pieces, given those that enter them. Under a decay the states before the chunks
    are always left, so that the pass is the same one whether gradients are wanted or not."""
    plan, (q, k, v, *_) = local.plan, local.inputs
    gates, o, leaving = gates_of(plan, local.inputs), plan.tokens(plan.sizes.V), plan.states_of_pieces()
    states = chunk_states(plan) if gates.present else None
    attend(plan, gates, Roles(q, k, v), o, S0, Left(leaving, states))
    return Output(o, leaving, ScalarDecaySaved(gates.read, S0, states) if local.use.saved else ())


def gradients(local: ScalarDecayRecurrence, backward: Backward, dS_end: Tensor | None) -> InputGradients:
    """The gradients, given those of o and of the states that leave."""
    gates = gates_of(local.plan, local.inputs, ScalarDecaySaved(*backward.saved).factors)
    prepared = local._prepared(backward, gates)
    return local._rest(backward, gates, prepared, Entered(dS_end, local.plan.states_of_pieces()))
