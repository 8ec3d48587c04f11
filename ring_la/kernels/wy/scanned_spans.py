"""Kernels in CUDA C++ on Hopper where states come from other ranks: the same three levels of one scan as in chunks of
64 tokens. A launch finds what each span does to a state, `spans.crossing` puts those maps and the border together, and
one launch goes over all spans; or that launch itself carries states through them, and to other ranks.

A span whose last tokens forget all that came before them is a map without a transition, found from those tokens alone:
what a rank sends then waits for no other rank.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.protocol import (
    Adjoint,
    Backward,
    Border,
    InputGradients,
    Inputs,
    Mail,
    Output,
    OutputUse,
    SpanMaps,
    Summary,
)
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.spans.crossing import Entered, cross
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.prefix import prefix, transitions_of_pieces
from ring_la.kernels.wy.across import Carried, SpanKernels

if TYPE_CHECKING:
    from ring_la.kernels.runtime.streams import SideStream


class NoNeighbours:
    """The border of a call through which no state crosses, for kernels that exchange states themselves."""

    def __init__(self) -> None:
        self.key: Hashable = "no neighbours"
        self.memory: tuple[Tensor, ...] = ()
        self.beside: SideStream | None = None
        self.whole = self.sends = self.carries = (False, False)

    def mail(self, states: tuple[int, int, int], reverse: bool) -> Mail:
        return (*(None,) * 4, 0, 0), (-1, -1, -1, 1, 0, 0, 0)

    def spans(self, *of_spans: Any, **named: Any) -> None:
        """Nothing comes."""


class FoundMaps(NamedTuple):
    """What is found for a summary or an adjoint."""

    maps: SpanMaps

    @property
    def savable(self) -> tuple[Tensor | None, ...]:
        return (self.maps.transition, self.maps.zero, self.maps.squares, self.maps.image, self.maps.half)


class SpansLeft(NamedTuple):
    """What a forward leaves for its gradients: of the spans' maps what `SpanMaps` has of transitions; and what its
    kernels take."""

    transition: Tensor
    zero: Tensor | None
    squares: Tensor | None
    image: Tensor | None
    half: Tensor | None
    rest: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, saved: tuple[Tensor | None, ...]) -> SpansLeft:
        transition, zero, squares, image, half, *rest = saved
        assert transition is not None
        return cls(transition, zero, squares, image, half, tuple(rest))

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self[:-1], *self.rest)


@dataclass(frozen=True)
class ScannedSpans:
    """One rank's tokens under a rule, where states are exchanged; `call` is what `kernels` take."""

    kernels: SpanKernels
    plan: SpanPlan
    call: Any
    use: OutputUse

    prepares: ClassVar[bool] = False
    crosses: ClassVar[bool] = True

    @classmethod
    def of(
        cls, kernels: SpanKernels, rule: Rule, inputs: Inputs, cu: Tensor | None, scale: float, use: OutputUse
    ) -> ScannedSpans:
        call, spans = kernels.cut(inputs, cu, scale, use.saved)
        return cls(kernels, SpanPlan.of(rule, call.inputs, cu, scale, (spans, spans)), call, use)

    def summary(self, S0: Tensor | None, through: bool, known: Summary[FoundMaps] | None = None) -> Summary[FoundMaps]:
        plan, found = (
            self.plan,
            FoundMaps(self.kernels.maps(self.call, self.use.saved, None)) if known is None else known.found,
        )
        _, leaving = prefix(plan, found.maps, plan.state(S0), False, enter=False)
        return Summary(transitions_of_pieces(plan, found.maps) if through else None, leaving, found)

    def prepare(self, summary: Summary[FoundMaps]) -> Summary[FoundMaps]:
        return summary

    def output(
        self, S0: Tensor | None, summary: Summary[FoundMaps] | None = None, border: Border | None = None
    ) -> Output:
        carried = self.carried(border if summary is None else None, S0, False, self.use.final)
        arrived = None if carried is None else carried.arrived
        maps = self.kernels.maps(self.call, self.use.saved, arrived) if summary is None else summary.found.maps
        entered = self.entered(maps, S0, border, False, self.use.final) if carried is None else carried
        o, saved = self.kernels.output(self.call, entered.entering, maps, self.use.saved, carried)
        left = SpansLeft(maps.transition, maps.zero, maps.squares, maps.image, maps.half, saved)
        return Output(o, entered.leaving if self.use.final else None, left.flat if self.use.saved else ())

    def adjoint(self, backward: Backward, dS_end: Tensor | None) -> Adjoint[FoundMaps]:
        found = FoundMaps(self.room_back(backward))
        self.kernels.add_back(self.call, found.maps, SpansLeft.of(backward.saved).rest, _read(backward.do), None)
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
        carried = self.carried(border if adjoint is None else None, dS_end, True, backward.S0 is not None)
        do, rest = _read(backward.do), SpansLeft.of(backward.saved).rest
        maps = self.room_back(backward) if adjoint is None else adjoint.found.maps
        prepared = None
        if border is not None and (carried is not None or not border.sends[True]):  # while what enters is on its way
            prepared = self.kernels.prepared(self.call, maps, rest, carried)
        if adjoint is None:
            self.kernels.add_back(self.call, maps, rest, do, carried)
        final = backward.S0 is not None
        entered = self.entered(maps, dS_end, border, True, final) if carried is None else carried
        grads = self.kernels.gradients(self.call, entered.entering, maps, rest, do, prepared, carried)
        return InputGradients(grads, None if backward.S0 is None else entered.leaving)

    def carried(self, border: Border | None, S: Tensor | None, reverse: bool, final: bool) -> Carried | None:
        """What kernels take that carry states themselves, given what enters the pieces from this rank; None: the border
        does. `final`: whether what leaves the pieces is wanted."""
        if border is None or not self.kernels.carries(self.call, reverse):
            return None
        plan, (B, _, H, _, K, V) = self.plan, self.plan.sizes
        mail = border.mail((B * H, K, V), reverse)
        if mail is None:
            return None
        spans = B, plan.spans.count, H
        arrived = torch.empty(2, *spans, dtype=torch.int32, device=self.call.inputs.v.device)
        rooms = plan.new(*spans, K, V), plan.states_of_pieces()
        return Carried(mail, plan.state(S), *rooms, final, reverse or self.use.saved, arrived)

    def room_back(self, backward: Backward) -> SpanMaps:
        """What each span does to the gradient of the state that leaves it, but for what it adds, for which there is
        room."""
        left = SpansLeft.of(backward.saved)
        of_transitions = left.zero, left.squares, left.image, left.half
        return SpanMaps(self.plan.rule.transition, self.plan.states_of_spans(), left.transition, True, *of_transitions)

    @staticmethod
    def has_left(kernels: SpanKernels, saved: tuple[Tensor | None, ...]) -> bool:
        """Whether it is `output` that has left this for the gradients; one in chunks leaves more."""
        return len(saved) == len(SpansLeft._fields) - 1 + kernels.left

    def entered(
        self,
        maps: SpanMaps,
        S: Tensor | None,
        border: Border | None,
        reverse: bool,
        final: bool,
    ) -> Entered:
        """What enters the spans, given what enters the pieces from this rank; `final`: whether what leaves these is
        wanted."""
        S = self.plan.state(S)
        if border is None:
            return Entered(*prefix(self.plan, maps, S, reverse))
        return cross(self.plan, maps, S, reverse, border, final=final)()


def _read(do: Tensor) -> Tensor:
    return aligned(do.to(torch.bfloat16))
