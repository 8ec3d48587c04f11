"""Recurrences with one span a piece: states go from chunk to chunk in order, nothing is composed.

So what a chunk gives depends on its tokens and on the state that enters it alone, whatever else is launched beside it,
and a state is the same wherever a document was cut at the border of a chunk.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.families import FAMILIES, unsupported
from ring_la.kernels.protocol import Backward, InputGradients, Inputs, Output, OutputUse
from ring_la.kernels.scalar_decay import in_order as scalar_decay
from ring_la.kernels.scalar_decay.recurrence import ScalarDecayRecurrence
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.wy import in_order as wy
from ring_la.kernels.wy.recurrence import WYRecurrence

CHUNK = 64
WIDEST = 128
"""Channels of heads under a scalar decay or none, at most: of wider ones gradients of decays are sums over spans."""


def reason_against(rule: Rule, inputs: Inputs, length: int) -> str:
    """Why these kernels cannot take a call on a sequence of that `length`, or an empty string: the same on all ranks,
    which may have no tokens."""
    v, family = inputs.v, FAMILIES.get(rule.plain)
    if rule.reads != "keys" or rule.write == "sum" or family is None:
        return f"rule {rule}"
    if v.element_size() != 2:
        return f"dtype {v.dtype}: chunks of {CHUNK} tokens are for two bytes"
    (H, K, V), some = inputs.state, v.numel() > 0
    if family is ScalarDecayRecurrence and max(K, V) > WIDEST:
        return f"head sizes {K} and {V}: under {rule} at most {WIDEST}"
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


def _recurrence(
    rule: Rule, inputs: Inputs, pieces: Pieces, scale: float, use: OutputUse
) -> ScalarDecayRecurrence | WYRecurrence:
    plan = SpanPlan.of(rule.plain, inputs, pieces.cu, scale, (pieces.spans, pieces.chunks))
    assert plan.chunk == CHUNK
    # a decay is read by token, whether it is constant or not: of a single token nobody can tell
    plan = dataclasses.replace(plan, constant=False, by_head=False)
    return FAMILIES[rule.plain](plan, plan.ready(inputs), inputs, use)


def forward(rule: Rule, inputs: Inputs, pieces: Pieces, scale: float, S0: Tensor, saved: bool) -> Output:
    """o, and the states that leave the pieces, entered by ``S0 [B, N, H, K, V]``;
    `saved`: with what `gradients` takes."""
    local = _recurrence(rule, inputs, pieces, scale, OutputUse(saved=saved))
    if isinstance(local, ScalarDecayRecurrence):
        return scalar_decay.forward(local, local.plan.state(S0))
    return wy.forward(local, local.plan.state(S0))


def gradients(
    rule: Rule, inputs: Inputs, pieces: Pieces, scale: float, backward: Backward, dS_end: Tensor
) -> InputGradients:
    """The gradients, given those of o and of the states that leave."""
    local = _recurrence(rule, inputs, pieces, scale, OutputUse(saved=True))
    if isinstance(local, ScalarDecayRecurrence):
        return scalar_decay.gradients(local, backward, local.plan.state(dS_end))
    return wy.gradients(local, backward, local.plan.state(dS_end))
