"""Who hears of launches while a call is written down: `launch` and `order` tell it, `Recorder` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from ring_la.kernels.runtime.triton_version import CompiledKernel, InterpretedKernel


class LaunchObserver(Protocol):
    """What wants to know of every launch."""

    def launched(
        self,
        how: CompiledKernel | InterpretedKernel,
        grid: tuple[int, int, int],
        args: Sequence[Any],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """A kernel was launched, on the caller's stream where `stream` is None."""

    def ordered(self, step: Callable[[], None]) -> None:
        """Streams were put in order by `step`."""


observing: ContextVar[LaunchObserver | None] = ContextVar("observing", default=None)
"""Who hears of what is launched now."""
