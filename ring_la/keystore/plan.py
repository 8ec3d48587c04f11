"""Where a step of decoding finds the keys it reads on this rank.

Tokens side by side, many of them or of the only sequence, are read where they are; blocks of others are read together,
as rows of one product, with the empty places of each masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .pages import Held, SlabTokens

ALONE = 16
"""Blocks side by side that are read by themselves: that takes longer than the launches it costs."""


class SlabBlocks(NamedTuple):
    """Blocks of one slab that are read together."""

    slab: int
    block: Tensor
    """Their numbers, int64 ``[M]``."""
    row: Tensor
    """Whose they are, int64 ``[M]``."""
    seen: Tensor
    """The places the row's token sees, bool ``[M, block]``."""


class Plan(NamedTuple):
    """What is read, in parts; each gives a result of one row."""

    alone: list[tuple[int, SlabTokens]]
    """Rows, and where tokens of theirs are."""
    together: list[SlabBlocks]
    table: Tensor
    """The parts of each row, int64 ``[N, ·]``; the number of parts: none."""

    @classmethod
    def of(cls, held: Sequence[Held], first: Sequence[int], block: int, device: torch.device) -> Plan:
        """Of each sequence the tokens of this rank from the one in `first`."""
        alone: list[tuple[int, SlabTokens]] = []
        together: dict[int, list[tuple[int, int, int, int]]] = {}  # by slab: block, row, first and last place
        for row, (x, begin) in enumerate(zip(held, first)):
            for span in x.spans(begin, x.here):
                if len(held) == 1 or span.stop - span.start >= ALONE * block:
                    alone.append((row, span))
                    continue
                for i in range(span.start // block, -(-span.stop // block)):
                    inside = max(0, span.start - i * block), min(block, span.stop - i * block)
                    together.setdefault(span.slab, []).append((i, row, *inside))
        parts = [row for row, _ in alone]
        blocks, place = [], torch.arange(block, device=device)
        for slab, entries in together.items():
            number, whose, low, high = torch.tensor(entries, device=device).unbind(1)
            parts += [entry[1] for entry in entries]
            blocks.append(SlabBlocks(slab, number, whose, (place >= low[:, None]) & (place < high[:, None])))
        return cls(alone, blocks, _table(parts, len(held), device))


def _table(parts: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """The numbers of each row's parts, filled up with the number of all."""
    of: list[list[int]] = [[] for _ in range(rows)]
    for i, row in enumerate(parts):
        of[row].append(i)
    most = max(map(len, of), default=0)
    filled = [mine + [len(parts)] * (most - len(mine)) for mine in of]
    return torch.tensor(filled, dtype=torch.int64, device=device).view(rows, most)
