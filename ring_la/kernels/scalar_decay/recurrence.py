"""Additive writes under a scalar decay or none, as a `Local`.

Passes over spans carry the state in registers. Where a decay's gradient is wanted the states before the chunks go to
memory, and the gradients come of all chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ring_la.kernels.protocol import (
    Adjoint,
    Backward,
    Border,
    InputGradients,
    Inputs,
    Output,
    SpanMaps,
    Summary,
)
from ring_la.kernels.scalar_decay.attend import Left, Roles, SpanSums, TokenDots, attend, gated_parts
from ring_la.kernels.scalar_decay.chunk_gradients import chunk_gradients
from ring_la.kernels.scalar_decay.gate_gradient import gate_gradient
from ring_la.kernels.scalar_decay.operands import Gates, by_token, chunk_states, gates_of
from ring_la.kernels.scalar_decay.states import adjoints_after_chunks, states_before_chunks
from ring_la.kernels.scalar_decay.summarise import maps_back, maps_of_spans
from ring_la.kernels.scalar_decay.write_gradients import write_gradients
from ring_la.kernels.spans.crossing import Entered, cross, enter
from ring_la.kernels.spans.prefix import prefix
from ring_la.kernels.spans.recurrence import SpanRecurrence


class ScalarDecaySaved(NamedTuple):
    """What spares the gradients work: a decay's factors by token, the states that enter the spans, and those before the
    chunks."""

    factors: Tensor | None = None
    entering: Tensor | None = None
    states: Tensor | None = None


class ScalarDecayMaps(NamedTuple):
    """What is found for a summary: how the decay is read, and the spans' maps."""

    gates: Gates
    maps: SpanMaps

    @property
    def savable(self) -> tuple[Tensor | None, ...]:
        return (None if self.gates.constant else self.gates.read,)


class Reads(NamedTuple):
    """What dq's pass leaves for the decay's gradient: q·dq by token, the states leaving the pieces, and the decay by
    token."""

    dots: TokenDots
    leaving: Tensor
    gates: Gates


class QueryGradients(NamedTuple):
    """dq, the states that entered the spans, and what else its pass was asked for."""

    dq: Tensor
    entering: Tensor | None
    reads: Reads | None = None


class ScalarDecayBack(NamedTuple):
    """What is found for an adjoint: how the decay is read, the spans' maps back, and once prepared the states before
    the chunks or dq, whichever the other gradients are made from."""

    gates: Gates
    maps: SpanMaps
    prepared: Tensor | QueryGradients | None = None


@dataclass(frozen=True)
class ScalarDecayRecurrence(SpanRecurrence[ScalarDecayMaps]):
    """One rank's tokens under one rule."""

    # -- forward -------------------------------------------------------------------------------------------

    def output(
        self, S0: Tensor | None, summary: Summary[ScalarDecayMaps] | None = None, border: Border | None = None
    ) -> Output:
        plan, (q, k, v, *_), S0 = self.plan, self.inputs, self.plan.state(S0)
        if summary is not None:
            gates, maps = summary.found
        elif border is not None or plan.spans.count > 1:
            gates, maps = self._maps(border is not None or S0 is not None)
        else:
            gates, maps = gates_of(plan, self.inputs), None
        entered = enter(plan, maps, S0) if border is None else cross(plan, maps, S0, False, border, final=False)()
        o = plan.tokens(plan.sizes.V)
        states = chunk_states(plan) if self._by_chunk(False) and self.use.saved and plan.saves_states else None
        attend(plan, gates, Roles(q, k, v), o, entered.entering, Left(entered.leaving, states))
        if not self.use.saved:
            return Output(o, entered.leaving)
        factors = None if gates.constant else gates.read
        return Output(o, entered.leaving, ScalarDecaySaved(factors, entered.entering, states))

    # -- backward ------------------------------------------------------------------------------------------

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[ScalarDecayBack]:
        found = self._maps_back(backward)
        _, entering = prefix(self.plan, found.maps, self.plan.state(dS_end), True, enter=False)
        return Adjoint(entering, found)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[ScalarDecayBack]) -> Adjoint[ScalarDecayBack]:
        """The part of `gradients` that needs no gradient of a state: dq, or the states before the chunks."""
        return Adjoint(adjoint.entering, adjoint.found._replace(prepared=self._prepared(backward, adjoint.found.gates)))

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[ScalarDecayBack] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        plan, saved = self.plan, ScalarDecaySaved(*backward.saved)
        do, dS_end = plan.cotangent(backward.do), plan.state(dS_end)
        if border is not None:
            return self._gradients_across(backward, dS_end, border)
        found = None if adjoint is None else adjoint.found
        gates = gates_of(plan, self.inputs, saved.factors) if found is None else found.gates
        prepared = None if found is None else found.prepared
        if plan.spans.count == 1:
            entered = enter(plan, None, dS_end, True)
        elif found is None and self._sums_with_dq:
            maps = SpanMaps(plan.rule.transition, plan.states_of_spans(), None, True)
            prepared = self._prepared(backward, gates, maps.own)
            entered = enter(plan, maps, dS_end, True)
        else:
            maps = maps_back(plan, gates, self.inputs.q, do, dS_end is not None) if found is None else found.maps
            entered = enter(plan, maps, dS_end, True)
        prepared = self._prepared(backward, gates) if prepared is None else prepared
        return self._rest(backward, gates, prepared, entered)

    def _gradients_across(self, backward: Backward, dS_end: Tensor | None, border: Border) -> InputGradients:
        """`gradients`, with what arrives at the borders. The passes leave room for the exchange they run beside."""
        saved = ScalarDecaySaved(*backward.saved)
        meanwhile = saved.states is None or not self._by_chunk(backward.gate)  # `_prepared` has something to do
        beside = border.beside if meanwhile else None
        crowded = replace(self, plan=replace(self.plan, crowded=beside is not None))
        found = crowded._maps_back(backward)
        crossed = cross(crowded.plan, found.maps, dS_end, True, border, beside, final=False)
        prepared = crowded._prepared(backward, found.gates)
        return crowded._rest(backward, found.gates, prepared, crossed())

    # -- what gradients are made of ------------------------------------------------------------------------

    def _by_chunk(self, gate: bool) -> bool:
        """Whether dq, dk and dg come of the chunks' states, all chunks at once: under a decay by token, or where
        `gate`, a decay's gradient, is wanted."""
        return self.plan.fits and self.plan.rule.decay == "scalar" and (gate or not self.plan.constant)

    @property
    def _sums_with_dq(self) -> bool:
        """Whether dq's pass, which reads do, also sums up the spans for the state's gradient."""
        return self.plan.fits and self.plan.rule.decay == "none"

    def _maps(self, all: bool) -> ScalarDecayMaps:
        gates = gates_of(self.plan, self.inputs)
        return ScalarDecayMaps(gates, maps_of_spans(self.plan, gates, self.inputs, all))

    def _maps_back(self, backward: Backward) -> ScalarDecayBack:
        gates = gates_of(self.plan, self.inputs, ScalarDecaySaved(*backward.saved).factors)
        return ScalarDecayBack(
            gates, maps_back(self.plan, gates, self.inputs.q, self.plan.cotangent(backward.do), True)
        )

    def _entering(self, backward: Backward, gates: Gates) -> Tensor | None:
        """The states that entered the spans."""
        saved, plan, S0 = ScalarDecaySaved(*backward.saved), self.plan, self.plan.state(backward.S0)
        if saved.entering is not None or plan.spans.count == 1:
            return S0 if saved.entering is None else saved.entering
        return enter(plan, maps_of_spans(plan, gates, self.inputs, S0 is not None), S0).entering

    def _prepared(self, backward: Backward, gates: Gates, sums: Tensor | None = None) -> Tensor | QueryGradients:
        """The states before the chunks, or dq. `sums`: room for what the spans add to the state's gradient, where dq's
        pass finds that, too."""
        plan, (q, k, v, *_), (B, T, H, _, K, _) = self.plan, self.inputs, self.plan.sizes
        saved, by_chunk = ScalarDecaySaved(*backward.saved), self._by_chunk(backward.gate)
        if by_chunk and saved.states is not None:
            return saved.states
        entering = self._entering(backward, gates)
        if by_chunk:
            return states_before_chunks(plan, gates, k, v, entering)
        dq, roles = plan.tokens(K), Roles(plan.cotangent(backward.do), v, k, transposed=True)
        if not (backward.gate and gates.present):
            attend(plan, gates, roles, dq, entering, extra=None if sums is None else SpanSums(q, sums))
            return QueryGradients(dq, entering)
        parts = gated_parts(plan, K)
        dots, leaving = TokenDots(q, plan.new(parts, B, H, T), plan.new(parts, B, H, T)), plan.states_of_pieces()
        factors = by_token(plan, self.inputs) if gates.constant else gates
        attend(plan, factors, roles, dq, entering, Left(leaving), dots)
        return QueryGradients(dq, entering, Reads(dots, leaving, factors))

    def _rest(
        self, backward: Backward, gates: Gates, prepared: Tensor | QueryGradients, entered: Entered
    ) -> InputGradients:
        """The other gradients, given those of the states after the spans (None: zero)."""
        plan, do, (adjoint, dS0, _) = self.plan, self.plan.cotangent(backward.do), entered
        if isinstance(prepared, QueryGradients):
            grads = self._gradients_by_span(prepared, gates, do, adjoint, dS0)
        else:
            adjoints = adjoints_after_chunks(plan, gates, self.inputs.q, do, adjoint, dS0)
            grads = chunk_gradients(plan, gates, self.inputs, do, prepared, adjoints)
        grads = grads if backward.gate else grads._replace(g=None)
        return InputGradients(plan.as_given(self.given, grads), None if backward.S0 is None else dS0)

    def _gradients_by_span(
        self, prepared: QueryGradients, gates: Gates, do: Tensor, adjoint: Tensor | None, dS0: Tensor
    ) -> Inputs:
        plan, (q, k, v, *_), (B, T, H, _, K, V) = self.plan, self.inputs, self.plan.sizes
        if plan.fits:
            return Inputs(prepared.dq, *write_gradients(plan, gates, self.inputs, do, adjoint, dS0))
        dk, dv, roles = plan.tokens(K), plan.tokens(V), Roles(v, do, q, reverse=True, transposed=True)
        attend(plan, gates, Roles(k, q, do, reverse=True), dv, adjoint, Left(dS0))
        if prepared.reads is None:
            attend(plan, gates, roles, dk, adjoint)
            return Inputs(prepared.dq, dk, dv)
        parts, (dots, ends, factors) = gated_parts(plan, K), prepared.reads
        before = ends if prepared.entering is None else prepared.entering  # with a single span none is before another
        edge = plan.new(parts, B, H, plan.spans.count)
        writes = TokenDots(k, plan.new(parts, B, H, T), None, before, ends, edge)
        attend(plan, factors, roles, dk, adjoint, extra=writes)
        dg = gate_gradient(plan, factors, dots, writes, adjoint is not None)
        return Inputs(prepared.dq, dk, dv, dg)
