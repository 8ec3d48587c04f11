"""The Triton backend of the linear recurrences: the `Local` protocol (see `kernels.local`) over its launches.

Levels of one scan: chunks inside a program, segments inside the GPU (summarise, prefix, one pass that carries the state
in registers), pieces across ranks. What a segment adds and its transition are found before any state arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import Border, Inputs
from ring_la.kernels.scalar_decay.launches import Early, Simple
from ring_la.kernels.segments.base import Kept
from ring_la.kernels.wy.launches import General


def unsupported(rule: Rule, inputs: Inputs) -> str | None:
    """Why these kernels cannot take this call; None if they can."""
    v = inputs.v
    (B, T, H, V), K = v.shape, inputs.q.shape[-1]
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {v.dtype}: the kernels take fp32, bf16 and fp16"
    if not (1 <= K <= 256 and 1 <= V <= 256):
        return f"head sizes {K} and {V}: the kernels take 1 to 256"
    if B * H > 65535:
        return f"batch × heads {B * H}: the kernels take at most 65535"
    if T == 0 or B == 0:
        return "no tokens"
    return None


class TritonRecurrence(Simple, General):
    """One rank's tokens under one rule. `kept`: what `kept()` of the one that made the output gave."""

    prepares, crosses = False, True

    def __init__(
        self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, kept: tuple[Tensor | None, ...] = ()
    ) -> None:
        super().__init__(rule, inputs, cu, scale, Kept(*kept))
        self._own: tuple[bool, Tensor, Tensor | None] | None = None  # the segments' maps, see `_summarise`
        self._own_back: tuple[Tensor, bool, Tensor, Tensor | None] | None = None
        entering = self._kept.entering
        fits = self.segments.count == (1 if entering is None else entering.shape[1])  # as the forward cut them
        self._entered: tuple[Tensor | None] | None = (entering,) if kept and fits else None
        u, states = self._kept.u, self._kept.states
        self._states = None if states is None else (self.inputs.v if u is None else u, states)
        self._early: Early | tuple[Tensor, Tensor] | None = None  # see `prepare_gradients`

    def summary(self, S0: Tensor | None, through: bool) -> tuple[Tensor | None, Tensor]:
        own, transition = self._summarise(True)
        _, leaving = self._prefix(own, transition, self._state(S0), False, enter=False)
        return (self._through(transition) if through else None), leaving

    def prepare(self) -> None:
        """Nothing: what the output needs before a state arrives was found for the summary."""

    def output(self, S0: Tensor | None, keep: bool = False, border: Border | None = None) -> tuple[Tensor, Tensor]:
        S0 = self._state(S0)
        if border is None:
            entering, leaving = self._enter(S0)
        else:
            entering, leaving = self._cross(*self._summarise(True), S0, False, border)()
        self._entered = (entering,)
        o = self._new(*self.inputs.v.shape, dtype=self.inputs.v.dtype)
        if self.simple:
            q, k, v = self.inputs[:3]
            states = self._chunk_states() if keep and self._by_chunk(False) and self._holds else None
            self._states = None if states is None else (v, states)
            self._attend(q, k, v, o, entering, leaving=leaving, states=states)
        else:
            self._states = self._room() if keep and self._holds else None
            self._forward(o=o, state=entering, leaving=leaving, keep=self._states)
        return o, leaving

    def kept(self) -> tuple[Tensor | None, ...]:
        """What spares the gradients work, after `output`: states entering the segments, and what the chunks found."""
        found = dict(entering=self._entered[0]) if self._entered else {}
        found["passed"] = self._kept.passed
        if self.F is not self.inputs.v:
            found["F"] = self.F
        if self.bounds is not self.inputs.v:
            found["bounds"] = self.bounds
        if self.dense and self._own is not None:
            found["whole" if self._own[0] else "transition"] = self._own[2]
        if not self.simple:
            x = self.intra
            found["A"] = x.A
            if self.decay == 2:
                found |= dict(G=self.G, low=x.low)
            if self.dense:
                found["M"] = x.M
            if self.dplr:
                found |= dict(Av=x.Av, L=x.L)
            if self._fine:
                found["Ar"] = x.Ar
        if self._states is not None:
            found |= dict(u=self._states[0] if self.dense else None, states=self._states[1])
        return Kept(**found)

    def adjoint(self, do: Tensor, dS_end: Tensor | None) -> Tensor:
        return self._prefix(*self._summarise_back(do, True), self._state(dS_end), True, enter=False)[1]

    def prepare_gradients(self, S0: Tensor | None, do: Tensor, gate: bool = True) -> None:
        """The part of `gradients` that needs no gradient of a state: dq, or U and the states before the chunks."""
        entering = None if self.simple and self._states is not None else self._enter_once(S0)
        if self.simple:
            self._early = self._early_gradients(entering, self._cotangent(do), gate)
        else:
            self._early = self._states or self._carry(entering)

    def _meanwhile(self, gate: bool) -> bool:
        """Whether `prepare_gradients` has anything to do: not where the forward left the chunks' states and all comes
        of those."""
        return self._states is None or (self.simple and not self._by_chunk(gate))

    def gradients(
        self, S0: Tensor | None, do: Tensor, dS_end: Tensor | None, gate: bool = True, border: Border | None = None
    ) -> tuple[Inputs, Tensor]:
        """See `Local`. S0 is what `output` was given, here or where `kept` comes from."""
        dS_end = self._state(dS_end)
        if border is not None:
            beside = border.beside if self._meanwhile(gate) else None
            self._crowded = beside is not None
            crossed = self._cross(*self._summarise_back(do, True), dS_end, True, border, beside)
            self.prepare_gradients(S0, do, gate)
            adjoint, dS0 = crossed()
        elif self.segments.count == 1:
            adjoint, dS0 = dS_end, self._pieces()
        elif self._sums_with_dq and self._early is None and self._own_back is None:
            own = self._maps()
            self._early = self._early_gradients(self._enter_once(S0), self._cotangent(do), gate, own)
            adjoint, dS0 = self._prefix(own, None, dS_end, True)
        else:
            adjoint, dS0 = self._prefix(*self._summarise_back(do, dS_end is not None), dS_end, True)
        if self._early is None:
            self.prepare_gradients(S0, do, gate)
        early, self._early = self._early, None
        do = self._cotangent(do)
        if self.simple:
            grads = self._late_gradients(early, self._entered and self._entered[0], adjoint, do, dS0, gate)
        else:
            grads = self._general_gradients(early, adjoint, do, dS0)
        return self._as_given(grads), dS0

    # -- segments' own maps --------------------------------------------------------------------------------

    def _enter(self, S0: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The state entering each segment, and a place for those leaving the pieces."""
        if self.segments.count == 1:
            return S0, self._pieces()
        return self._prefix(*self._summarise(S0 is not None), S0, False)

    def _enter_once(self, S0: Tensor | None) -> Tensor | None:
        if self._entered is None:
            self._entered = (self._enter(self._state(S0))[0],)
        return self._entered[0]

    def _summarise(self, full: bool) -> tuple[Tensor, Tensor | None]:
        """What each segment adds, and its transition (log-decays, or dense). Not `full`: only what one call needs that
        starts and ends with no state."""
        if self._own is not None and (self._own[0] or not full):
            return self._own[1:]
        self._bounded = full  # one rank alone has a wave of programs, which ends with its longest: nothing is gained
        own = self._maps()
        if self.simple:
            transition = self._new(*own.shape[:3]) if self.decay else None
            self._summarise_simple(self.inputs.k, self.inputs.v, own, transition, 1.0, False, full)
        else:
            transition = self._new(*own.shape[:4], self.K) if self.dense else self._new(*own.shape[:4])
            self._forward(state=own, trans=transition, summary=True, full=full)
        self._own = (full, own, transition)
        return own, transition

    def _summarise_back(self, do: Tensor, full: bool) -> tuple[Tensor, Tensor | None]:
        """The same right to left, for the gradient `do` of the output."""
        if self._own_back is not None and self._own_back[0] is do and (self._own_back[1] or not full):
            return self._own_back[2:]
        own, g = self._maps(), self._cotangent(do)
        if self.simple:
            transition = self._new(*own.shape[:3]) if self.decay else None
            self._summarise_simple(self.inputs.q, g, own, transition, self.scale, True, full)
        else:
            transition = self._dense_transition(full) if self.dense else self._new(*own.shape[:4])
            self._backward(g, own, log_a=transition, summary=True, full=full)
        self._own_back = (do, full, own, transition)
        return own, transition

    def _dense_transition(self, full: bool) -> Tensor:
        known = self._kept.whole
        if known is None and not full:
            known = self._kept.transition
        return self._summarise(full)[1] if known is None else known

    def _maps(self) -> Tensor:
        return self._new(self.B, self.segments.count, self.H, self.K, self.V)
