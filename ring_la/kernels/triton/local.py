"""The Triton backend of the linear recurrences: the `Local` protocol (see `kernels.local`) over its launches.

Levels of one scan: chunks inside a program, segments inside the GPU (summarise, prefix, one pass that carries the state
in registers), pieces across ranks. What a segment adds and its transition are found before any state arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.local import Inputs
from ring_la.kernels.triton.general import General
from ring_la.kernels.triton.simple import Simple


def unsupported(rule: Rule, inputs: Inputs) -> str | None:
    """Why these kernels cannot take this call; None if they can."""
    q, v = inputs.q, inputs.v
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {v.dtype}: the kernels take fp32, bf16 and fp16"
    if not (1 <= q.shape[-1] <= 256 and 1 <= v.shape[-1] <= 256):
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}: the kernels take 1 to 256"
    if v.shape[0] * v.shape[2] > 65535:
        return f"batch × heads {v.shape[0] * v.shape[2]}: the kernels take at most 65535"
    if v.shape[1] == 0 or v.shape[0] == 0:
        return "no tokens"
    return None


def supports(rule: Rule, inputs: Inputs) -> bool:
    return unsupported(rule, inputs) is None


class TritonRecurrence(Simple, General):
    """One rank's tokens under one rule."""

    def __init__(self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float) -> None:
        super().__init__(rule, inputs, cu, scale)
        self._summary: tuple[bool, Tensor, Tensor | None] | None = None
        self._entering: tuple[Tensor | None, Tensor | None] | None = None

    def summary(self, S0: Tensor | None, through: bool) -> tuple[Tensor | None, Tensor]:
        own, transition = self._summarise(True)
        _, leaving = self._prefix(own, transition, self._state(S0), False)
        return (self._through(transition) if through else None), leaving

    def prepare(self) -> None:
        """Nothing: what the output needs before a state arrives was found for the summary."""

    def output(self, S0: Tensor | None) -> tuple[Tensor, Tensor]:
        S0 = self._state(S0)
        entering, leaving = self._enter(S0)
        self._entering = (S0, entering)
        o = torch.empty_like(self.inputs.v)
        if self.simple:
            q, k, v = self.inputs[:3]
            self._attend(q, k, v, o, entering, leaving=leaving)
        else:
            self._forward(o=o, state=entering, leaving=leaving)
        return o, leaving

    def adjoint(self, do: Tensor, dS_end: Tensor | None) -> Tensor:
        do = self._cotangent(do)
        return self._prefix(*self._summarise_back(do, True), self._state(dS_end), True)[1]

    def gradients(
        self, S0: Tensor | None, do: Tensor, dS_end: Tensor | None, gate: bool = True
    ) -> tuple[Inputs, Tensor]:
        """See `Local`. gate=False spares the gradient of g where nobody wants it, as under a static decay."""
        S0, dS_end, do = self._state(S0), self._state(dS_end), self._cotangent(do)
        if self._entering is not None and self._entering[0] is S0:
            entering = self._entering[1]
        else:
            entering, _ = self._enter(S0)
        if self.segments.count == 1:
            adjoint, dS0 = dS_end, self._pieces(dS_end)
        else:
            adjoint, dS0 = self._prefix(*self._summarise_back(do, dS_end is not None), dS_end, True)
        if self.simple:
            grads = self._simple_gradients(entering, adjoint, do, dS0, gate)
        else:
            grads = self._general_gradients(entering, adjoint, do, dS0)
        return self._as_given(grads), dS0

    # -- segments' own maps --------------------------------------------------------------------------------

    def _enter(self, S0: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The state entering each segment, and a place for those leaving the pieces."""
        if self.segments.count == 1:
            return S0, self._pieces(S0)
        return self._prefix(*self._summarise(S0 is not None), S0, False)

    def _summarise(self, full: bool) -> tuple[Tensor, Tensor | None]:
        """What each segment adds, and its transition (log-decays, or dense). Not `full`: only what one call needs that
        starts and ends with no state."""
        if self._summary is not None and (self._summary[0] or not full):
            return self._summary[1:]
        own = self._new(self.B, self.segments.count, self.H, self.K, self.V)
        if self.simple:
            transition = self._new(*own.shape[:3]) if self.decay else None
            self._summarise_simple(self.inputs.k, self.inputs.v, own, transition, 1.0, False, full)
        else:
            transition = self._new(*own.shape[:4], self.K) if self.dense else self._new(*own.shape[:4])
            self._forward(state=own, trans=transition, summary=True, full=full)
        self._summary = (full, own, transition)
        return own, transition

    def _summarise_back(self, do: Tensor, full: bool) -> tuple[Tensor, Tensor | None]:
        own = self._new(self.B, self.segments.count, self.H, self.K, self.V)
        if self.simple:
            transition = self._new(*own.shape[:3]) if self.decay else None
            self._summarise_simple(self.inputs.q, do, own, transition, self.scale, True, full)
        else:
            transition = self._summarise(full)[1] if self.dense else self._new(*own.shape[:4])
            self._backward(do, own, log_a=transition, summary=True, full=full)
        return own, transition
