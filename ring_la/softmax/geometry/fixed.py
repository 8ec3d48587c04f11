"""Blocks of rows at fixed places of their documents: what results are made of that must not depend on a split.

A block is the rows of one document at positions ``n · size … (n + 1) · size − 1``. It is computed with all of them,
whichever are at hand: a row that is not stands there as zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .pair import Reach
from .tokens import ANY_DOCUMENT, Tokens

NOBODY = -2
"""The document of a place of a block where no row is at hand."""


class FixedBlock(NamedTuple):
    """Some rows of one block.

    Attributes:
        document, start, size: whose rows these are, the position of the first, and how many places there are.
        rows: the rows at hand. places: of each, its place in the block.
        tokens: how all places stand; those without a row in no document.
    """

    document: int
    start: int
    size: int
    rows: Tensor
    places: Tensor
    tokens: Tokens

    def fill(self, x: Tensor, dim: int = 1, value: float = 0.0) -> Tensor:
        """The rows of ``x`` along `dim` at their places, `value` elsewhere."""
        shape = list(x.shape)
        shape[dim] = self.size
        return x.new_full(shape, value).index_copy_(dim, self.places, x.index_select(dim, self.rows))

    def take(self, into: Tensor, block: Tensor, dim: int = 1) -> None:
        """Write a block's results to the rows of `into`."""
        into.index_copy_(dim, self.rows, block.index_select(dim, self.places))

    def seen_by(self, queries: FixedBlock, reach: Reach) -> bool:
        """Whether `queries` may see any of these keys."""
        if self.document not in (queries.document, ANY_DOCUMENT):
            return False
        ahead, behind = self.start - (queries.start + queries.size - 1), queries.start - (self.start + self.size - 1)
        return (reach.right is None or ahead <= reach.right) and (reach.left is None or behind <= reach.left)


def fixed_blocks(tokens: Tokens, size: int) -> list[FixedBlock]:
    """The blocks of these rows, by document and position; made once for each size."""
    return tokens.kept(_made, lambda: _made(tokens, size), size)


def _made(tokens: Tokens, size: int) -> list[FixedBlock]:
    position, document, index = (x.cpu() for x in (tokens.positions, tokens.documents, tokens.index))
    number = torch.div(position, size, rounding_mode="floor")
    which, block_of = torch.unique(torch.stack([document, number]), dim=1, return_inverse=True)
    order = torch.argsort(block_of, stable=True)
    counts = torch.bincount(block_of, minlength=which.shape[1]).tolist()
    out = []
    for (d, n), rows in zip(which.T.tolist(), order.split(counts)):
        places = position[rows] - n * size
        at = torch.full((size,), NOBODY, device="cpu").index_fill_(0, places, d)
        stands = Tokens(
            None,
            size,
            tokens.device,
            ((torch.arange(size, device="cpu") + n * size).to(tokens.device), at.to(tokens.device)),
        )
        stands.index = (
            torch.zeros(size, dtype=torch.int64, device="cpu").index_copy_(0, places, index[rows]).to(tokens.device)
        )
        out.append(FixedBlock(d, n * size, size, rows.to(tokens.device), places.to(tokens.device), stands))
    return out
