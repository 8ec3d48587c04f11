"""One rank's tokens under the rule "sum": every head is one number, ``S ← e^g S + v``, ``o = scale · S``.

Nothing is multiplied with a matrix. Pieces are cut into spans, which are summed up first (`walks`); a scan over them
gives the states that enter each, and a second walk the output. Backward is the same from right to left:

    G_t = scale · do_t + e^{g_{t+1}} G_{t+1},      dv_t = G_t,      dg_t = G_t · e^{g_t} S_{t−1}
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import (
    PLAIN,
    Adjoint,
    Backward,
    Border,
    InputGradients,
    Inputs,
    Output,
    OutputUse,
    Summary,
)
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.sums import walks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(inputs: Inputs) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    v, g = inputs.v, inputs.g
    if any(x is not None and x.dtype not in DTYPES for x in (v, g)):
        return f"dtype {v.dtype}: the kernels take fp32, bf16 and fp16"
    if v.shape[0] > 65535:
        return f"batch {v.shape[0]}: the kernels take at most 65535"
    return "no tokens" if v.numel() == 0 else ""


class SpanParts(NamedTuple):
    """What each span adds to the state, and its whole log-decay, ``[B, NS, C]``."""

    own: Tensor
    totals: Tensor


@dataclass(frozen=True)
class Reached:
    """The states that enter spans and leave pieces; None: zeros, and what the walk over the only span finds."""

    entering: Tensor | None
    leaving: Tensor | None
    sums: SpanParts | None


class GatedSums:
    """See `protocol.Local`. States are ``[B, N, H, 1, 1]``."""

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = False

    def __init__(self, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, use: OutputUse = PLAIN) -> None:
        self.rule, self.scale, self.use, self.cu = rule, float(scale), use, cu
        self.v = inputs.v.squeeze(3).contiguous()
        self.g = None if inputs.g is None else inputs.g.contiguous()

    @cached_property
    def runs(self) -> Runs:
        """The spans of its pieces."""
        cu = None if self.cu is None else aligned(self.cu.to(device=self.v.device, dtype=torch.int32))
        return Runs.of(self.v.shape[1], walks.span_length(*self.v.shape), walks.TOKENS, cu)

    # -- the protocol --------------------------------------------------------------------------------------

    def summary(self, S0: Tensor | None, through: bool, known: Summary[SpanParts] | None = None) -> Summary[SpanParts]:
        sums = self._sums() if known is None else known.found
        over = walks.over_spans(*sums, _narrow(S0), self.runs)
        A = over.totals.exp() if through and self.rule.decay == "scalar" else None
        return Summary(A, _wide(over.ends), sums)

    def prepare(self, summary: Summary[SpanParts]) -> Summary[SpanParts]:
        return summary

    def output(
        self, S0: Tensor | None, summary: Summary[SpanParts] | None = None, border: Border | None = None
    ) -> Output:
        assert border is None  # see `crosses`
        if summary is None and self.cu is None:
            o, ends, *found = _forward(self.v, self.g, _narrow(S0), self.scale)
            leaving = _wide(ends) if self.use.final else None
            return Output(o.unsqueeze(3), leaving, tuple(found) if found[0] is not None else ())
        reached = self._reached(S0, None if summary is None else summary.found)
        walk = walks.forwards(self.v, self.g, reached.entering, self.runs, self.scale)
        assert walk.out is not None
        saved = () if reached.sums is None else (reached.entering, reached.sums.totals)
        leaving = walk.ends if reached.leaving is None else reached.leaving
        return Output(walk.out[..., None], _wide(leaving), saved)

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[Tensor]:
        if self._single:
            into = self._own_gradients(backward, _narrow(dS_end))
            return Adjoint(_wide(into), into)
        own = self._own_gradients(backward)
        over = walks.over_spans(own, self._saved(backward)[1], _narrow(dS_end), self.runs, reverse=True)
        return Adjoint(_wide(over.ends), own)

    def prepare_gradients(self, backward: Backward, adjoint: Adjoint[Tensor]) -> Adjoint[Tensor]:
        return adjoint

    def gradients(
        self, backward: Backward, dS_end: Tensor | None, adjoint: Adjoint[Tensor] | None = None,
        border: Border | None = None,
    ) -> InputGradients:  # fmt: skip
        assert border is None
        entering, totals = self._saved(backward)
        behind, first = _narrow(dS_end), None
        if adjoint is None and self.cu is None:
            tensors = backward.do.squeeze(3), self.v, self.g, entering, totals, behind
            return _gradients(*_backward(*tensors, self.scale, backward.gate))
        if totals is not None:
            own = self._own_gradients(backward) if adjoint is None else adjoint.found
            over = walks.over_spans(own, totals, behind, self.runs, reverse=True)
            behind, first = over.out, over.ends
        kept = None
        if self.g is not None and backward.gate:
            kept = walks.forwards(self.v, self.g, entering, self.runs, 1.0, kept=True).out
        do = backward.do.squeeze(3).contiguous()
        dv, dg, into = walks.backwards(do, self.g, kept, behind, self.runs, self.scale, self.v.dtype)
        assert dv is not None
        return _gradients(dv, dg, into if first is None else first)

    # -- spans ---------------------------------------------------------------------------------------------

    @property
    def _single(self) -> bool:
        """Whether there is one span, of one piece, which needs no summing up."""
        return self.runs.table is None and self.runs.count == 1

    def _sums(self) -> SpanParts:
        walk = walks.forwards(self.v, self.g, None, self.runs, 1.0, write=False)
        return SpanParts(walk.ends, walk.totals)

    def _reached(self, S0: Tensor | None, sums: SpanParts | None) -> Reached:
        if self._single:
            return Reached(_narrow(S0), None, None)
        sums = self._sums() if sums is None else sums
        over = walks.over_spans(*sums, _narrow(S0), self.runs)
        return Reached(over.out, over.ends, sums)

    def _saved(self, backward: Backward) -> tuple[Tensor | None, Tensor | None]:
        """The states that enter spans, and the spans' log-decays (None: there is one)."""
        if backward.saved:
            entering, totals = backward.saved
            return entering, totals
        reached = self._reached(backward.S0, None)
        return reached.entering, None if reached.sums is None else reached.sums.totals

    def _own_gradients(self, backward: Backward, behind: Tensor | None = None) -> Tensor:
        """What the outputs of each span, and what comes from behind it, send to the state that enters it
        ``[B, NS, C]``."""
        do = backward.do.squeeze(3).contiguous()
        return walks.backwards(do, self.g, None, behind, self.runs, self.scale, None).entering


def _runs(v: Tensor) -> Runs:
    return Runs.of(v.shape[1], walks.span_length(*v.shape), walks.TOKENS, None)


@replayed(3)
def _forward(
    v: Tensor, g: Tensor | None, S0: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One piece a batch row: o ``[B, T, C]``, what leaves ``[B, 1, C]``, and of several spans what enters them and
    their log-decays."""
    runs, entering, totals, leaving = _runs(v), S0, None, None
    if runs.count > 1:
        sums = walks.forwards(v, g, None, runs, 1.0, write=False)
        over = walks.over_spans(sums.ends, sums.totals, S0, runs)
        entering, totals, leaving = over.out, sums.totals, over.ends
    walk = walks.forwards(v, g, entering, runs, scale)
    assert walk.out is not None
    several = totals is not None
    return walk.out, walk.ends if leaving is None else leaving, entering if several else None, totals


@replayed(6)
def _backward(
    do: Tensor, v: Tensor, g: Tensor | None, entering: Tensor | None, totals: Tensor | None, behind: Tensor | None,
    scale: float, gate: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Its gradients dv, dg and of the states that enter, given what `_forward` left and what comes from behind."""
    runs, first = _runs(v), None
    if totals is not None:
        own = walks.backwards(do, g, None, None, runs, scale, None).entering
        over = walks.over_spans(own, totals, behind, runs, reverse=True)
        behind, first = over.out, over.ends
    wanted = g is not None and gate
    kept = walks.forwards(v, g, entering, runs, 1.0, kept=True).out if wanted else None
    dv, dg, into = walks.backwards(do, g, kept, behind, runs, scale, v.dtype)
    assert dv is not None
    return dv, dg, into if first is None else first


def _gradients(dv: Tensor, dg: Tensor | None, entering: Tensor) -> InputGradients:
    """As they are returned; none of q and k, which nobody reads."""
    given: list[Any] = [None, None, dv.unsqueeze(3), dg]
    return InputGradients(Inputs(*given), _wide(entering))


def _wide(states: Tensor) -> Tensor:
    return states.view(*states.shape, 1, 1)


def _narrow(states: Tensor | None) -> Tensor | None:
    return None if states is None else states[..., 0, 0].float().contiguous()
