"""Delta writes, diagonal decays and dplr, as a `Local`: chunks' own products, then passes over spans.

Everything between two chunks is a state; the gradients of a chunk's inputs come from the states before the chunks and
the gradients of those after them, all chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ring_la.kernels.protocol import (
    Adjoint,
    Backward,
    Border,
    InputGradients,
    Output,
    Summary,
)
from ring_la.kernels.spans.crossing import Entered, cross, enter
from ring_la.kernels.spans.prefix import prefix
from ring_la.kernels.spans.recurrence import SpanRecurrence
from ring_la.kernels.spans.table import BACKWARD, Table
from ring_la.kernels.wy.backward import adjoints_after_chunks, maps_back
from ring_la.kernels.wy.delta_gradients import delta_gradients
from ring_la.kernels.wy.diagonal_gradients import diagonal_gradients
from ring_la.kernels.wy.diagonal_products import diagonal_products
from ring_la.kernels.wy.dplr_gradients import dplr_gradients
from ring_la.kernels.wy.dplr_products import dplr_products
from ring_la.kernels.wy.forward import maps_of_spans, output, room_for_states, states_before_chunks
from ring_la.kernels.wy.products import as_they_are, scalar_products
from ring_la.kernels.wy.saved import ChunkProducts, ChunkStates, SavedProducts, WYBack, WYMaps, WYSaved
from ring_la.kernels.wy.weigh import weighed_again
from ring_la.kernels.wy.writes import writes_alone


@dataclass(frozen=True)
class WYRecurrence(SpanRecurrence[WYMaps]):
    """One rank's tokens under one rule."""

    # -- forward -------------------------------------------------------------------------------------------

    def output(self, S0: Tensor | None, summary: Summary[WYMaps] | None = None, border: Border | None = None) -> Output:
        plan, v, S0 = self.plan, self.inputs.v, self.plan.state(S0)
        if summary is not None:
            found = summary.found
        elif border is not None or plan.spans.count > 1:
            found = self._maps(border is not None or S0 is not None)
        else:
            found = WYMaps(self._products(SavedProducts(), False, not self.use.saved), None)
        products, maps = found
        entered = enter(plan, maps, S0) if border is None else cross(plan, maps, S0, False, border, final=plan.dense)()
        states = room_for_states(plan, v) if self.use.saved and plan.saves_states else None
        o = output(plan, products, v, entered.entering, entered.leaving, states)
        return Output(o, entered.leaving, self._saved(found, entered, states).flat if self.use.saved else ())

    def _saved(self, found: WYMaps, entered: Entered, states: ChunkStates | None) -> WYSaved:
        (products, maps), dense = found, self.plan.dense
        transition, every = (maps.transition, maps.all) if dense and maps is not None else (None, False)
        return WYSaved(
            products.kept,
            entering=entered.entering,
            transitions=transition if every else None,
            later_transitions=None if every else transition,
            passed=entered.passed,
            u=states.u if dense and states is not None else None,
            states=None if states is None else states.states,
        )

    # -- backward ------------------------------------------------------------------------------------------

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[WYBack]:
        found = self._maps_back(backward, True)
        _, entering = prefix(self.plan, found.back, self.plan.state(dS_end), True, enter=False)
        return Adjoint(entering, found)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[WYBack]) -> Adjoint[WYBack]:
        """The part of `gradients` that needs no gradient of a state: U and the states before the chunks."""
        found = adjoint.found
        return Adjoint(adjoint.entering, found._replace(prepared=self._prepared(backward, found.forward)))

    def gradients(
        self,
        backward: Backward,
        dS_end: Tensor | None,
        adjoint: Adjoint[WYBack] | None = None,
        border: Border | None = None,
    ) -> InputGradients:
        plan, saved, dS_end = self.plan, WYSaved.of(backward.saved), self.plan.state(dS_end)
        if backward.queries and plan.rule.decay == "diagonal" and plan.rule.write in ("additive", "delta"):
            return self._queries(backward)
        if border is not None:
            found = self._maps_back(backward, True)
            beside = border.beside if saved.states is None else None  # `_prepared` has something to do
            crossed = cross(plan, found.back, dS_end, True, border, beside, saved.passed, final=plan.dense)
            prepared = self._prepared(backward, found.forward)
            return self._rest(backward, found.forward.products, prepared, crossed())
        if adjoint is not None:
            found = adjoint.found
        elif plan.spans.count > 1:
            found = self._maps_back(backward, dS_end is not None)
        else:
            found = WYBack(WYMaps(self._products(saved.products, False), None), None)
        entered = enter(plan, found.back, dS_end, True)
        prepared = self._prepared(backward, found.forward) if found.prepared is None else found.prepared
        return self._rest(backward, found.forward.products, prepared, entered)

    # -- what they are made of -----------------------------------------------------------------------------

    def _products(self, saved: SavedProducts, bounded: bool, alone: bool = False) -> ChunkProducts:
        """What the chunks compute before any state arrives; `bounded`: and how much of a state they let through;
        `alone`: for an output, which no gradients follow."""
        plan, inputs = self.plan, self.inputs
        if plan.rule.decay != "diagonal":
            known = saved.inverse is not None
            return as_they_are(inputs, saved) if known else scalar_products(plan, inputs, bounded)
        if saved.weighed_q is not None and saved.weighed_writes is not None:
            reads, writes, values = saved.weighed_reads, saved.weighed_writes, saved.weighed_values
            return ChunkProducts(saved.weighed_q, reads, writes, values, saved)
        if saved.pairs is not None:
            return weighed_again(plan, inputs, saved)
        return dplr_products(plan, inputs) if plan.rule.write == "dplr" else diagonal_products(plan, inputs, alone)

    def _maps(self, all: bool) -> WYMaps:
        # with no state at either end one rank has a wave of programs, which ends with its longest: bounds gain nothing
        products = self._products(SavedProducts(), bounded=all, alone=not self.use.saved)
        return WYMaps(products, maps_of_spans(self.plan, products, self.inputs.v, all))

    def _maps_back(self, backward: Backward, all: bool) -> WYBack:
        plan, saved, do = self.plan, WYSaved.of(backward.saved), self.plan.cotangent(backward.do)
        transition = saved.later_transitions if saved.transitions is None and not all else saved.transitions
        forward = WYMaps(self._products(saved.products, bounded=all), None)
        if plan.dense and transition is None:
            forward = forward._replace(maps=maps_of_spans(plan, forward.products, self.inputs.v, all))
            transition = forward.maps.transition
        return WYBack(forward, maps_back(plan, forward.products, do, transition, all))

    def _prepared(self, backward: Backward, found: WYMaps) -> ChunkStates:
        """U and the states before the chunks."""
        plan, v, saved = self.plan, self.inputs.v, WYSaved.of(backward.saved)
        if saved.states is not None:
            return ChunkStates(v if saved.u is None else saved.u, saved.states)
        S0, entering = plan.state(backward.S0), saved.entering
        if plan.spans.count > 1 and entering is None:
            maps, all = found.maps, S0 is not None
            if maps is None or (all and not maps.all):
                maps = maps_of_spans(plan, found.products, v, all)
            entering = enter(plan, maps, S0).entering
        return states_before_chunks(plan, found.products, v, S0 if entering is None else entering)

    def _queries(self, backward: Backward) -> InputGradients:
        """The gradient of q alone, which needs no gradient of a state."""
        plan, do = self.plan, self.plan.cotangent(backward.do)
        if plan.rule.write == "additive":
            products = writes_alone(plan, self.inputs)
        else:
            products = self._products(WYSaved.of(backward.saved).products, bounded=False)
        states = self._prepared(backward, WYMaps(products, None))
        grads = diagonal_gradients(plan, self.inputs, products, do, states, None)
        return InputGradients(plan.as_given(self.given, grads), None)

    def _rest(
        self, backward: Backward, products: ChunkProducts, states: ChunkStates, entered: Entered,
        entries: Table = BACKWARD,
    ) -> InputGradients:  # fmt: skip
        """All gradients, given those of the states after the spans (None: zero)."""
        plan, rule, do, (adjoint, dS0, _) = self.plan, self.plan.rule, self.plan.cotangent(backward.do), entered
        back = adjoints_after_chunks(plan, products, do, states, adjoint, dS0, entries)
        by_chunk = diagonal_gradients if rule.decay == "diagonal" else delta_gradients
        by_chunk = dplr_gradients if rule.write == "dplr" else by_chunk
        grads = by_chunk(plan, self.inputs, products, do, states, back)
        return InputGradients(plan.as_given(self.given, grads), None if backward.S0 is None else dS0)
