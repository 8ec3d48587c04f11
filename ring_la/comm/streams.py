"""On which stream messages run: beside the current one, or in its order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .members import Members


class MessageStreams:
    """The stream of a group's messages.

    Attributes:
        side: a stream of this group's own; None on the CPU and in a group of one.
    """

    def __init__(self, members: Members) -> None:
        self.side = torch.cuda.Stream(members.device) if members.on_cuda and members.size > 1 else None
        self._in_order = False

    @property
    def beside(self) -> torch.cuda.Stream | None:
        """The stream messages run on beside the current one; None: they stand in the current stream's order."""
        return None if self._in_order else self.side

    @contextmanager
    def in_order(self, wanted: bool = True) -> Iterator[None]:
        """What is exchanged here has nothing to run beside: it spares the switch to another stream and back."""
        before, self._in_order = self._in_order, wanted or self._in_order
        try:
            yield
        finally:
            self._in_order = before
