"""Whether a rank's blocks go together, in one launch of kernels of which a row's bits do not depend on the others.

The same for all ranks: it goes by devices and dtypes alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..context import ShardedLayout
from ..kernels.choice import triton_installed
from .blocks import BLOCK, blocks_of

ON_GPUS = True
"""Whether they do on CUDA devices."""
everywhere = False
"""Set by tests that run the kernels in Triton's interpreter, on the CPU."""

if TYPE_CHECKING:
    from ..kernels.fixed.weight import BlockPlaces

F = TypeVar("F", bound=Callable[..., Any])


def at_once(x: Tensor) -> bool:
    """Whether what is computed of `x` row by row is one call."""
    return everywhere or (ON_GPUS and x.is_cuda and triton_installed())


def halves(*x: Tensor) -> bool:
    """Whether products of these go by kernels: numbers of two bytes, of one dtype."""
    return at_once(x[0]) and x[0].dtype in (torch.bfloat16, torch.float16) and len({t.dtype for t in x}) == 1


def by_element(fn: F) -> F:
    """Decorator: `fn` maps each element, or each row by operations that are by element and those of `per_token`, so
    that one call on all tokens gives each the same bits as any other. What tokens share meets them by its last
    dimensions: where it wants a gradient it may come with those of tokens before its own."""
    fn.by_element = True  # type: ignore[attr-defined]
    return fn


def places_of(layout: ShardedLayout, rows: int) -> Tensor:
    """Where each block of each of so many rows of a batch starts and ends in ``[rows · T]``, int32 ``[blocks, 2]``."""
    return layout.kept(places_of, lambda: _table(_places(layout, rows), layout), rows)


def pieces_of(layout: ShardedLayout, rows: int) -> Tensor:
    """The same with the start and the end of the block's piece and the piece's number, int32 ``[blocks, 5]``."""
    return layout.kept(pieces_of, lambda: _table(_in_pieces(layout, rows), layout, 5), rows)


def by_length(layout: ShardedLayout, rows: int) -> BlockPlaces:
    """The same, full blocks apart from shorter ones."""
    return layout.kept(by_length, lambda: _by_length(layout, rows), rows)


def _by_length(layout: ShardedLayout, rows: int) -> BlockPlaces:
    from ..kernels.fixed.weight import BlockPlaces  # needs Triton

    found = _places(layout, rows)
    full, ragged = ([p for p in found if (p[1] - p[0] == BLOCK) == full] for full in (True, False))
    run = all(start == before for (_, before), (start, _) in zip(full, full[1:]))
    return BlockPlaces(_table(full, layout), _table(ragged, layout), run)


def _places(layout: ShardedLayout, rows: int) -> list[tuple[int, int]]:
    T = layout.local_length
    return [(b * T + start, b * T + stop) for b in range(rows) for start, stop in blocks_of(layout)]


def _in_pieces(layout: ShardedLayout, rows: int) -> list[tuple[int, ...]]:
    offsets = layout.piece_offsets
    found = []
    for start, stop in _places(layout, rows):
        row = start // layout.local_length
        piece = bisect_right(offsets, start - row * layout.local_length) - 1
        ends = (row * layout.local_length + at for at in offsets[piece : piece + 2])
        found.append((start, stop, *ends, row * len(layout.pieces) + piece))
    return found


def _table(places: Sequence[tuple[int, ...]], layout: ShardedLayout, columns: int = 2) -> Tensor:
    return torch.tensor(places, dtype=torch.int32, device="cpu").view(-1, columns).to(layout.cp.device)
