"""The kernels of the WY form with one span a piece: states go from chunk to chunk in order, nothing is composed.

So what a chunk gives depends on its tokens and on the state that enters it alone, whatever else is launched beside it,
and a state is the same wherever a document was cut at the border of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.families import FAMILIES, unsupported
from ring_la.kernels.protocol import Backward, InputGradients, Inputs, Output, OutputUse
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.wy.forward import output, room_for_states
from ring_la.kernels.wy.recurrence import WYRecurrence
from ring_la.kernels.wy.saved import ChunkStates, SavedProducts, WYSaved

CHUNK = 64


def reason_against(rule: Rule, inputs: Inputs, length: int) -> str:
    """Why these kernels cannot take a call on a sequence of that `length`, or an empty string: the same on all ranks,
    which may have no tokens."""
    v = inputs.v
    if rule.reads != "keys" or rule.write == "sum" or FAMILIES.get(rule.plain) is not WYRecurrence:
        return f"rule {rule}"
    if v.element_size() != 2:
        return f"dtype {v.dtype}: chunks of {CHUNK} tokens are for two bytes"
    (H, K, V), some = inputs.state, v.numel() > 0
    if length * H * max(K, V, CHUNK) >= 2**31:
        return f"{length} tokens: places within a piece are of 31 bits"
    return unsupported(rule, inputs) if some else ""


class Pieces(NamedTuple):
    """Pieces at `cu` (int32 ``[N+1]``, none empty), a span each, and their chunks."""

    cu: Tensor
    spans: Runs
    chunks: Runs

    @classmethod
    def of(cls, T: int, cu: Tensor) -> Pieces:
        """Those of T tokens."""
        return cls(cu, Runs.of(T, (T // CHUNK + 1) * CHUNK, CHUNK, cu), Runs.of(T, CHUNK, CHUNK, cu))


def _recurrence(rule: Rule, inputs: Inputs, pieces: Pieces, scale: float, use: OutputUse) -> WYRecurrence:
    plan = SpanPlan.of(rule.plain, inputs, pieces.cu, scale, (pieces.spans, pieces.chunks))
    assert plan.chunk == CHUNK
    return WYRecurrence(plan, plan.ready(inputs), inputs, use)


def forward(rule: Rule, inputs: Inputs, pieces: Pieces, scale: float, S0: Tensor, saved: bool) -> Output:
    """o, and the states that leave the pieces, entered by ``S0 [B, N, H, K, V]``;
    `saved`: with what `gradients` takes."""
    local = _recurrence(rule, inputs, pieces, scale, OutputUse(saved=saved))
    plan, v, S0 = local.plan, local.inputs.v, local.plan.state(S0)
    products, leaving = local._products(SavedProducts(), False), local.plan.states_of_pieces()
    states = room_for_states(plan, v) if saved else None
    o = output(plan, products, v, S0, leaving, states)
    if states is None:
        return Output(o, leaving, ())
    kept = WYSaved(products.saved, u=states.u if plan.dense else None, states=states.states)
    return Output(o, leaving, kept.flat)


def gradients(
    rule: Rule, inputs: Inputs, pieces: Pieces, scale: float, backward: Backward, dS_end: Tensor
) -> InputGradients:
    """The gradients, given those of o and of the states that leave."""
    from ring_la.kernels.spans.crossing import Entered

    local = _recurrence(rule, inputs, pieces, scale, OutputUse(saved=True))
    plan, saved = local.plan, WYSaved.of(backward.saved)
    products = local._products(saved.products, False)
    assert saved.states is not None
    states = ChunkStates(local.inputs.v if saved.u is None else saved.u, saved.states)
    return local._rest(backward, products, states, Entered(plan.state(dS_end), plan.states_of_pieces()))
