"""The passes of the WY form over pieces of one span each (see `kernels.in_order`)."""

from __future__ import annotations

from torch import Tensor

from ring_la.kernels.protocol import Backward, InputGradients, Output
from ring_la.kernels.spans.crossing import Entered
from ring_la.kernels.spans.table import IN_ORDER_BACKWARD, IN_ORDER_OUTPUT
from ring_la.kernels.wy.diagonal_rows import diagonal_rows
from ring_la.kernels.wy.dplr_rows import dplr_rows
from ring_la.kernels.wy.forward import output, room_for_states
from ring_la.kernels.wy.products import scalar_products
from ring_la.kernels.wy.recurrence import WYRecurrence
from ring_la.kernels.wy.saved import ChunkProducts, ChunkStates, WYSaved


def forward(local: WYRecurrence, S0: Tensor | None) -> Output:
    """o and the states that leave the pieces, given those that enter them."""
    plan, v = local.plan, local.inputs.v
    products, leaving = _products(local), plan.states_of_pieces()
    states = room_for_states(plan, v) if local.use.saved else None
    o = output(plan, products, v, S0, leaving, states, IN_ORDER_OUTPUT)
    if states is None:
        return Output(o, leaving, ())
    kept = WYSaved(products.saved, u=states.u if plan.dense else None, states=states.states)
    return Output(o, leaving, kept.flat)


def gradients(local: WYRecurrence, backward: Backward, dS_end: Tensor | None) -> InputGradients:
    """The gradients, given those of o and of the states that leave."""
    plan, saved = local.plan, WYSaved.of(backward.saved)
    products = local._products(saved.products, False)
    assert saved.states is not None
    states = ChunkStates(local.inputs.v if saved.u is None else saved.u, saved.states)
    return local._rest(backward, products, states, Entered(dS_end, plan.states_of_pieces()), IN_ORDER_BACKWARD)


def _products(local: WYRecurrence) -> ChunkProducts:
    """What chunks compute before a state arrives, no row of it from a later token."""
    plan, inputs = local.plan, local.inputs
    if plan.rule.decay != "diagonal":  # decays are differences of two tokens there, and products those of rows
        return scalar_products(plan, inputs, bounded=False)
    return dplr_rows(plan, inputs) if plan.rule.write == "dplr" else diagonal_rows(plan, inputs)
