"""What one call of a split model knows."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...context import ContextParallel, GridLayout
from ...errors import ArgumentError
from ...softmax.ahead import KeysAhead
from .keys import BlockKeys, GivenMask
from .plans import TokenRows
from .streams import Layouts, Streams


class DenoiserCall:
    """One call of the model.

    Attributes:
        streams, keys: its tokens, and the keys its blocks see.
        masked: the mask that the last block got.
        batch: its rows.
        started: whether a block has run, refiners aside.
        residual: a residual that came with the call, and its number of tokens.
        how: keywords of its attention: kernel and wire.
        rotary: the rotary embedding of the block under way, where its keys go first.
        posted: keys and values that have gone before their queries, as a compiler may trace them; on_the_way: the same
            as they travel; posts: how many have gone so far.
        grid: the layout of the image's tokens where they are a grid.
        parts: whole tensors that several blocks get, by id and role, and this rank's part of them.
    """

    def __init__(self, cp: ContextParallel, layouts: Layouts, batch: int) -> None:
        self.streams, self.batch, self.started = Streams(cp.rank, cp.size), batch, False
        self.residual: tuple[str, int] | None = None
        self.how: dict[str, Any] = {}
        self.keys = BlockKeys(cp, layouts, self.streams)
        self.grid: GridLayout | None = None
        self.rotary: Any = None
        self.posted: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.on_the_way: KeysAhead | None = None
        self.posts = 0
        self.masked: GivenMask | None = None
        self.parts: dict[tuple[int, TokenRows], tuple[Tensor, Tensor]] = {}

    def place(self, grid: GridLayout) -> None:
        """Split the image by slices of `grid`.

        Raises:
            ArgumentError: it has fewer than ranks.
        """
        if grid.shape[0] < grid.world_size:
            expected = f"at least {grid.world_size} rows or frames of tokens, one for each rank"
            raise ArgumentError("hidden_states", expected, f"a grid {list(grid.shape)}")
        self.grid, self.streams.unit = grid, math.prod(grid.shape[1:])
