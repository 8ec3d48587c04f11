"""What a caller of `parallelize` chose."""

from __future__ import annotations

from dataclasses import dataclass

from ...context import ContextParallel
from ...errors import ArgumentError


@dataclass(frozen=True)
class Settings:
    """The arguments of `parallelize`, which says what they mean.

    Raises:
        ArgumentError: naming the argument.
    """

    cp: ContextParallel
    kind: str
    average: bool
    loss_chunk: int | None
    check: bool

    def __post_init__(self) -> None:
        if not isinstance(self.cp, ContextParallel):
            raise ArgumentError("cp", "a ContextParallel", type(self.cp).__name__)
        if self.kind not in ("zigzag", "contiguous"):
            raise ArgumentError("kind", "zigzag or contiguous", repr(self.kind))
        if self.loss_chunk is not None and (not isinstance(self.loss_chunk, int) or self.loss_chunk < 1):
            raise ArgumentError("loss_chunk", "an int ≥ 1 or None", repr(self.loss_chunk))

    @property
    def scale(self) -> int:
        """What gradients of a call's results are multiplied by."""
        return self.cp.size if self.average else 1
