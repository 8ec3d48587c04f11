"""The states that enter a rank's spans: from its own pieces alone, or with what comes across its borders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Border, SpanMaps
from ring_la.kernels.runtime.streams import SideStream, aside, join
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.prefix import dense_transitions_of_pieces, prefix, prefix_and_transitions


class Entered(NamedTuple):
    """The states entering the spans (None: zero) and those leaving the pieces, or their gradients the other way; the
    products of the pieces' dense transitions, where what comes goes on through them."""

    entering: Tensor | None
    leaving: Tensor
    passed: Tensor | None = None


def enter(plan: SpanPlan, maps: SpanMaps | None, S: Tensor | None, reverse: bool = False) -> Entered:
    """`S` enters the pieces. `maps` are read where there is more than one span; of a single one what leaves is still to
    be filled, by the pass over it."""
    if plan.spans.count == 1:
        return Entered(S, plan.states_of_pieces())
    return Entered(*prefix(plan, maps, S, reverse))


def cross(
    plan: SpanPlan, maps: SpanMaps, S: Tensor | None, reverse: bool, border: Border, beside: SideStream | None = None,
    passed: Tensor | None = None, *, final: bool,
) -> Callable[[], Entered]:  # fmt: skip
    """Start `enter` with what comes from beyond this rank's pieces, on the stream `beside` if there is one; the result
    waits for it. `passed`: that of the way forward. `final`: whether what leaves is wanted
    (the passes over chunks under elementwise maps find it themselves)."""
    found = _own(plan, maps, S, reverse, border, passed)
    with aside(beside):
        border.spans(
            maps, S, found.entering, found.leaving, plan.spans.first, reverse, beside=beside is not None,
            through=found.passed, final=final,
        )  # fmt: skip
    return partial(_arrived, beside, (maps, S), found)


def _own(
    plan: SpanPlan, maps: SpanMaps, S: Tensor | None, reverse: bool, border: Border, passed: Tensor | None
) -> Entered:  # fmt: skip
    """What is found before anything comes: of pieces that the border does not see to, and, where nobody has looked
    which dense transitions are 0 or how large, of whole ones through which something goes on."""
    if not border.whole[reverse]:
        entering, leaving = prefix(plan, maps, S, reverse)
    else:
        entering, leaving = torch.empty_like(maps.own), None
    if plan.dense and maps.zero is None and border.carries[reverse]:
        if passed is None and not reverse:
            leaving, passed = prefix_and_transitions(plan, maps, S)
        elif leaving is None:
            _, leaving = prefix(plan, maps, S, reverse, enter=False)
        passed = dense_transitions_of_pieces(plan, maps) if passed is None else passed
    return Entered(entering, plan.states_of_pieces() if leaving is None else leaving, passed)


def _arrived(beside: SideStream | None, read: tuple[object, ...], found: Entered) -> Entered:
    """`found`, behind what was launched beside; what that has `read` lasts until then."""
    join(beside)
    return found
