"""Launches on a stream beside the current one, and what puts the two in order, now and in every replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ring_la.kernels.runtime.observer import observing


class SideStream:
    """A stream beside the current one, and the events that order the two."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._here, self._there = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """Put it behind what the current stream has so far."""
        self._here.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._here)

    def join(self) -> None:
        """Put the current stream behind it."""
        self._there.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self._there)


launching_on: ContextVar[torch.cuda.Stream | None] = ContextVar("launching_on", default=None)
"""The stream that launches go to; None: the current one."""


@contextmanager
def aside(side: SideStream | None) -> Iterator[None]:
    """Launches made here go to a stream beside the current one; what they use must last until `join`."""
    if side is None:
        yield
        return
    order(side.fork)
    token = launching_on.set(side.stream)
    try:
        yield
    finally:
        launching_on.reset(token)


def join(side: SideStream | None) -> None:
    """What follows on the current stream stands behind what was launched beside it."""
    if side is not None:
        order(side.join)


def order(step: Callable[[], None]) -> None:
    """Order streams, now and wherever this call is replayed."""
    step()
    observer = observing.get()
    if observer is not None:
        observer.ordered(step)
