"""The states that enter a rank's spans: from its own pieces alone, or with what comes across its borders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Border, PieceTransitions, SpanMaps
from ring_la.kernels.runtime.streams import SideStream, aside, join
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.prefix import dense_transitions_of_pieces, prefix, prefix_and_transitions


class Entered(NamedTuple):
    """The states entering the spans (None: zero) and those leaving the pieces, or their gradients the other way; the
    products of the pieces' dense transitions, where what comes goes on through them."""

    entering: Tensor | None
    leaving: Tensor
    passed: PieceTransitions | None = None


def enter(plan: SpanPlan, maps: SpanMaps | None, S: Tensor | None, reverse: bool = False) -> Entered:
    """`S` enters the pieces. `maps` are read where there is more than one span; of a single one what leaves is still to
    be filled, by the pass over it."""
    if plan.spans.count == 1:
        return Entered(S, plan.states_of_pieces())
    return Entered(*prefix(plan, maps, S, reverse))


def cross(
    plan: SpanPlan, maps: SpanMaps, S: Tensor | None, reverse: bool, border: Border, beside: SideStream | None = None,
    passed: PieceTransitions | None = None,
) -> Callable[[], Entered]:  # fmt: skip
    """Start `enter` with what comes from beyond this rank's pieces, on the stream `beside` if there is one; the result
    waits for it. `passed`: that of the way forward."""
    if plan.dense:
        return _cross_dense(plan, maps, S, reverse, border, beside, passed)
    if border.whole[reverse]:
        found = Entered(torch.empty_like(maps.own), plan.states_of_pieces())
    else:
        found = Entered(*prefix(plan, maps, S, reverse))
    with aside(beside):
        border.spans(maps, S, found.entering, found.leaving, plan.spans.first, reverse, beside is not None)
    return partial(_arrived, beside, (maps, S), lambda: found)


def _cross_dense(
    plan: SpanPlan, maps: SpanMaps, S: Tensor | None, reverse: bool, border: Border, beside: SideStream | None,
    passed: PieceTransitions | None,
) -> Callable[[], Entered]:  # fmt: skip
    """The same for dense maps: links need those of whole pieces, and the scan starts again with what arrives."""
    if not border.arrives[reverse]:
        found = Entered(*prefix(plan, maps, S, reverse), passed)
        with aside(beside):
            border.dense(passed, found.leaving, found.leaving, reverse)
        return partial(_arrived, beside, (), lambda: found)
    if border.carries[reverse] and passed is None and not reverse:
        leaving, passed = prefix_and_transitions(plan, maps, S)
    else:
        _, leaving = prefix(plan, maps, S, reverse, enter=False)
        if border.carries[reverse] and passed is None:
            passed = dense_transitions_of_pieces(plan, maps)
    several = plan.spans.pieces > 1
    zero = torch.zeros_like if several else torch.empty_like
    came = S.clone() if several and S is not None else zero(leaving)
    with aside(beside):
        border.dense(passed, came, leaving, reverse)
    return partial(_arrived, beside, (leaving,), lambda: Entered(*prefix(plan, maps, came, reverse), passed))


def _arrived(beside: SideStream | None, read: tuple[object, ...], result: Callable[[], Entered]) -> Entered:
    """`result`, behind what was launched beside; what that has `read` lasts until then."""
    join(beside)
    return result()
