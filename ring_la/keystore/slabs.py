"""The memory: of each layer a tensor for each slab, ``[blocks · block, heads, channels]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .pages import Extent


class KeySize(NamedTuple):
    """What one token takes in one layer.

    Of latents (`ring_la.mla`) ``heads`` is 1, ``key`` L + R and ``value`` 0: a value is the beginning of its key.
    """

    heads: int
    key: int
    value: int


class Slabs:
    """Tensors of keys and values by layer and slab, as `Pages` asks for them.

    Args:
        sizes: of each layer. block: tokens a block has room for. dtype, device: of the tensors.

    Attributes:
        k, v: of each layer, by the slab's number ``[blocks · block, heads, ·]``.
    """

    def __init__(self, sizes: Sequence[KeySize], block: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sizes, self._block, self._dtype, self._device = sizes, block, dtype, device
        self.k: list[dict[int, Tensor]] = [{} for _ in sizes]
        self.v: list[dict[int, Tensor]] = [{} for _ in sizes]

    def grow(self, slab: int, blocks: int) -> None:
        """A slab more, of so many blocks."""
        tokens = blocks * self._block
        for layer, (heads, key, value) in enumerate(self._sizes):
            for memory, width in ((self.k, key), (self.v, value)):
                memory[layer][slab] = torch.zeros(tokens, heads, width, dtype=self._dtype, device=self._device)

    def drop(self, slab: int) -> None:
        """A slab that no sequence has blocks in."""
        for layer in (*self.k, *self.v):
            del layer[slab]

    def copy(self, source: Extent, to: Extent) -> None:
        """What is in some blocks, into others."""
        n = self._block
        for layer in (*self.k, *self.v):
            layer[to.slab][to.first * n : (to.first + to.size) * n] = layer[source.slab][
                source.first * n : (source.first + source.size) * n
            ]
