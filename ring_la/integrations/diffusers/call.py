"""What one call of a split model knows."""

from __future__ import annotations

from torch import Tensor

from ...context import ContextParallel
from .keys import GivenMask, Keys
from .plans import TokenRows
from .streams import Layouts, Streams


class DenoiserCall:
    """One call of the model.

    Attributes:
        streams, keys: its tokens, and the keys its blocks see.
        masked: the mask that the last block got.
        batch: its rows.
        started: whether a block has run.
        parts: whole tensors that several blocks get, by id and role, and this rank's part of them.
    """

    def __init__(self, cp: ContextParallel, layouts: Layouts, batch: int) -> None:
        self.streams, self.batch, self.started = Streams(cp.rank, cp.size), batch, False
        self.keys = Keys(cp, layouts)
        self.masked: GivenMask | None = None
        self.parts: dict[tuple[int, TokenRows], tuple[Tensor, Tensor]] = {}
