"""Forward results that do not depend on how the sequence is split, bit for bit.

Rows are computed in blocks that stand at fixed places of the whole sequence, each against the same keys in the same
order: a rank that owns some rows of a block computes all of it, with zeros for the rows of others, so that every matrix
product has the shape it has on any other split.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from ...context import CANONICAL_CHUNK
from ..merge import Gradients, Partial
from ..scores import Scores
from ..tiles import tiles
from ..tokens import Tokens
from .backend import Ask, Backend
from .torch_backend import TorchBackend


class Canonical(Backend):
    """The PyTorch backend on a fixed grid of rows.

    Args:
        whole: for the rows of a rank, all rows of the sequence in order. Keys must come in order too.
    """

    name = "canonical"

    def __init__(self, whole: Mapping[Tokens, Tokens]) -> None:
        self.whole, self.block = whole, TorchBackend()

    def refuses(self, ask: Ask) -> str:
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, tq: Tokens, tk: Tokens, out: Partial) -> None:
        whole, blocks = self.whole[tq], tq.index // CANONICAL_CHUNK
        before, all_rows = copy(out), torch.arange(len(tq), device=q.device)
        for number in blocks.unique().tolist():
            block = whole.cut(number * CANONICAL_CHUNK, min(len(whole), (number + 1) * CANONICAL_CHUNK))
            mine = all_rows[blocks == number]
            at = tq.index[mine] - number * CANONICAL_CHUNK
            rows = q.new_zeros(q.shape[0], len(block), *q.shape[2:]).index_copy_(1, at, q.index_select(1, mine))
            part = before.pick(mine, at, len(block))
            for tile in tiles(scores, block, tk):
                part.add(*self.block.tile(rows, k, v, scores, block, tk, tile), tile.rows)
            out.put(part, at, mine)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        delta: Tensor | None,
        scores: Scores,
        tq: Tokens,
        tk: Tokens,
        out: Gradients,
    ) -> None:
        self.block.backward(do, q, k, v, o, lse, delta, scores, tq, tk, out)
