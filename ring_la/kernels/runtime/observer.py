"""Who hears of launches while a call is written down: `launch` and `order` tell it, `Recorder` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class LaunchObserver(Protocol):
    """What wants to know of every launch."""

    def launched(
        self,
        how: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """A kernel was launched, on the caller's stream where `stream` is None."""

    def ordered(self, step: Callable[[], None]) -> None:
        """Streams were put in order by `step`."""


observing: ContextVar[LaunchObserver | None] = ContextVar("observing", default=None)
"""Who hears of what is launched now."""
