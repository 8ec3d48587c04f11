"""Calls that came by before. A forward or a backward pass that one tape plays is played at once, without asking again
which kernels take it and what they need of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .protocol import Backward, InputGradients, Inputs, Local

Tensors = Sequence[Tensor | None]
"""What a pass takes: the inputs, the pieces' offsets, and the states that enter; backward the gradients of those that
leave, then the states that enter, the gradient of o, and what was saved."""


class Shortcut(Protocol):
    """How a pass was done, for others like it."""

    def ready(self, tensors: Tensors, border: Any) -> Callable[[], Any] | None:
        """What does it for these; None: they lie otherwise, or what decides about kernels is no longer as it was."""


class KnownCall:
    """What is known of one kind of calls, which have all but their values alike.

    Attributes:
        call, crossing: of split calls what `linear` makes of all but their tensors, and of shapes; None: not yet.
    """

    __slots__ = ("_shortcuts", "call", "crossing")

    def __init__(self) -> None:
        self._shortcuts: dict[Hashable, Shortcut] = {}
        self.call: Any = None
        self.crossing: Any = None

    def ready(self, tensors: Tensors, border: Any = None, way: Hashable = None) -> Callable[[], Any] | None:
        """What does a pass, if it is known how. `way`: None: forward; else what is asked of a backward pass."""
        shortcut = self._shortcuts.get(way)
        return None if shortcut is None else shortcut.ready(tensors, border)

    def learn(self, local: Any, tensors: Tensors, way: Hashable = None) -> None:
        """How a backend has just done it, if it says so."""
        shortcut = getattr(local, "shortcut", None)
        found = None if shortcut is None else shortcut(tensors)
        if found is not None:
            self._shortcuts[way] = found


def gradients(
    known: KnownCall | None, begin: Callable[[], Local[Any, Any]], inputs: Inputs, cu: Tensor | None,
    backward: Backward, dS_end: Tensor | None, border: Any = None,
) -> InputGradients:  # fmt: skip
    """`Local.gradients` of what was not summarised before: as one of its kind was found, or of the backend that `begin`
    gives."""
    tensors = (*inputs, cu, dS_end, backward.S0, backward.do, *backward.saved)
    way = backward.gate, backward.queries, dS_end is None, *[None if x is None else x.shape for x in backward.saved]
    again = None if known is None else known.ready(tensors, border, way)
    if again is not None:
        return again()
    local = begin()
    grads = local.gradients(backward, dS_end, **({} if border is None else {"border": border}))
    if known is not None:
        known.learn(local, tensors, way)
    return grads
