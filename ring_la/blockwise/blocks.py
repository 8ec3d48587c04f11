"""Where the blocks of a rank are: runs of at most 64 tokens at fixed places of their document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..context import CANONICAL_CHUNK, ShardedLayout
from ..errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

BLOCK = CANONICAL_CHUNK
"""Tokens a block. A document's last block may be shorter; it is computed as a full one."""


def fixed(layout: object) -> TypeIs[ShardedLayout]:
    """Whether results under a layout must not depend on how the sequence is split or packed."""
    return isinstance(layout, ShardedLayout) and layout.cp.deterministic


def blocks_of(layout: ShardedLayout) -> list[tuple[int, int]]:
    """(start, stop) of each block among this rank's tokens, found once.

    Raises:
        UnsupportedError: a layout that cuts blocks: a striped one, or one with given numbers of tokens.
    """
    return layout.kept(_found, lambda: _found(layout))


def _found(layout: ShardedLayout) -> list[tuple[int, int]]:
    layout.require_runs("deterministic=True")
    out: list[tuple[int, int]] = []
    for piece, start in zip(layout.pieces, layout.piece_offsets):
        if (piece.start - layout.cu_seqlens[piece.document]) % BLOCK:
            expected = f"borders at multiples of {BLOCK} tokens of each document with deterministic=True"
            raise UnsupportedError("layout", expected, repr(layout), "Make it by ContextParallel.layout")
        stop = start + len(piece)
        out += [(a, min(a + BLOCK, stop)) for a in range(start, stop, BLOCK)]
    return out


def filled(x: Tensor, b: int, start: int, stop: int) -> Tensor:
    """Rows of ``x [B, T, …]`` as a block ``[1, 64, …]`` of its own memory, zeros behind them."""
    out = x.new_zeros(1, BLOCK, *x.shape[2:])
    out[0, : stop - start] = x[b, start:stop]
    return out


def together(parts: list[Tensor], rows: int, tokens: int, like: Tensor) -> Tensor:
    """Parts ``[n, …]`` of each row's blocks, one row after the other, as ``[B, T, …]``."""
    if not parts:
        return like.new_zeros(rows, tokens, *like.shape[2:])
    return torch.cat(parts).view(rows, tokens, *parts[0].shape[1:])
