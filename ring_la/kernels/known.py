"""Calls that came by before. A forward pass that one tape plays is played at once, without asking again which kernels
take it and what they need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .protocol import Output

Tensors = Sequence[Tensor | None]
"""A call's inputs, its pieces' offsets and the states that enter them."""


class Shortcut(Protocol):
    """How a forward pass was done, for others like it."""

    def ready(self, tensors: Tensors, border: Any) -> Callable[[], Output] | None:
        """What does it for these; None: they lie otherwise, or what decides about kernels is no longer as it was."""


class KnownCall:
    """What is known of the forward passes of one kind of calls, which have all but their values alike.

    Attributes:
        call, crossing: of split calls what `linear` makes of all but their tensors, and of shapes; None: not yet.
    """

    __slots__ = ("_shortcut", "call", "crossing")

    def __init__(self) -> None:
        self._shortcut: Shortcut | None = None
        self.call: Any = None
        self.crossing: Any = None

    def ready(self, tensors: Tensors, border: Any = None) -> Callable[[], Output] | None:
        """What does the forward pass, if it is known how."""
        return None if self._shortcut is None else self._shortcut.ready(tensors, border)

    def learn(self, local: Any, tensors: Tensors) -> None:
        """How a backend has just done it, if it says so."""
        shortcut = getattr(local, "shortcut", None)
        if shortcut is not None:
            self._shortcut = shortcut(tensors)
