"""Kernels in CUDA C++ on Hopper where states come from other ranks: the same three levels of one scan as in chunks of
64 tokens. A launch finds what each span does to a state, `spans.crossing` puts those maps and the border together, and
one launch goes over all spans.

A span whose last tokens forget all that came before them is a map without a transition, found from those tokens alone:
what a rank sends then waits for no other rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import (
    Adjoint,
    Backward,
    Border,
    InputGradients,
    Inputs,
    Output,
    OutputUse,
    SpanMaps,
    Summary,
)
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.spans.crossing import Entered, cross
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.prefix import prefix, transitions_of_pieces
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.wy import gdn_spans
from ring_la.kernels.wy.gdn_launches import GDNCall, KeptChunks
from ring_la.kernels.wy.span_launches import CHUNK


class FoundMaps(NamedTuple):
    """What is found for a summary or an adjoint; nothing of it is kept for a backward pass."""

    maps: SpanMaps

    @property
    def savable(self) -> tuple[Tensor | None, ...]:
        return ()


@dataclass(frozen=True)
class ScannedSpans:
    """One rank's tokens under a delta rule, where states are exchanged."""

    plan: SpanPlan
    call: GDNCall
    use: OutputUse

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = True

    @classmethod
    def of(cls, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, use: OutputUse) -> ScannedSpans:
        call = gdn_spans.call_of(inputs, cu, scale)
        rows = inputs.v.shape[0]
        spans = Runs(call.length, CHUNK, call.count // rows, 1, None, None) if call.runs is None else call.runs
        return cls(SpanPlan.of(rule, call.inputs, cu, scale, (spans, spans)), call, use)

    def summary(self, S0: Tensor | None, through: bool, known: Summary[FoundMaps] | None = None) -> Summary[FoundMaps]:
        plan, found = self.plan, FoundMaps(gdn_spans.maps(self.call)) if known is None else known.found
        _, leaving = prefix(plan, found.maps, plan.state(S0), False, enter=False)
        return Summary(transitions_of_pieces(plan, found.maps) if through else None, leaving, found)

    def prepare(self, summary: Summary[FoundMaps]) -> Summary[FoundMaps]:
        return summary

    def output(
        self, S0: Tensor | None, summary: Summary[FoundMaps] | None = None, border: Border | None = None
    ) -> Output:
        maps = gdn_spans.maps(self.call) if summary is None else summary.found.maps
        entered = self._entered(maps, S0, border, False)
        o, kept = gdn_spans.output(self.call, entered.entering, self.use.saved)
        return Output(o, entered.leaving, () if kept is None else tuple(kept))

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[FoundMaps]:
        found = FoundMaps(self._maps_back(backward))
        _, entering = prefix(self.plan, found.maps, self.plan.state(dS_end), True, enter=False)
        return Adjoint(entering, found)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[FoundMaps]) -> Adjoint[FoundMaps]:
        return adjoint

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[FoundMaps] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        maps = self._maps_back(backward) if adjoint is None else adjoint.found.maps
        entered = self._entered(maps, dS_end, border, True)
        grads = gdn_spans.gradients(self.call, entered.entering, _kept(backward), _read(backward.do))
        return InputGradients(grads, None if backward.S0 is None else entered.leaving)

    def _maps_back(self, backward: Backward) -> SpanMaps:
        return gdn_spans.maps_back(self.call, _kept(backward), _read(backward.do))

    def _entered(self, maps: SpanMaps, S: Tensor | None, border: Border | None, reverse: bool) -> Entered:
        S = self.plan.state(S)
        if border is None:
            return Entered(*prefix(self.plan, maps, S, reverse))
        return cross(self.plan, maps, S, reverse, border)()


def _kept(backward: Backward) -> KeptChunks:
    """What the forward left, without which these are not asked for gradients."""
    kept = KeptChunks.of(backward.saved)
    assert kept is not None
    return kept


def _read(do: Tensor) -> Tensor:
    return aligned(do.to(torch.bfloat16))
