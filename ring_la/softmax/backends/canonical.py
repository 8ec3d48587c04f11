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
from ..geometry import Pair, Tokens, tiles
from ..merging import Gradients, Partial
from ..scores import Scores
from .backend import AttentionBackend, QueryRows
from .torch_backend import TorchBackend


class Canonical(AttentionBackend):
    """The PyTorch backend on a fixed grid of rows.

    Args:
        whole: for the rows of a rank, all rows of the sequence in order. Keys must come in order too.
    """

    name = "canonical"
    fixed_keys = True
    knows = TorchBackend.knows

    def __init__(self, whole: Mapping[Tokens, Tokens]) -> None:
        self.whole, self.block = whole, TorchBackend()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        tq = pair.rows
        whole, blocks = self.whole[tq], tq.index // CANONICAL_CHUNK
        before, all_rows = copy(out), torch.arange(len(tq), device=q.device)
        for number in blocks.unique().tolist():
            block = whole.cut(number * CANONICAL_CHUNK, min(len(whole), (number + 1) * CANONICAL_CHUNK))
            mine = all_rows[blocks == number]
            at = tq.index[mine] - number * CANONICAL_CHUNK
            rows = q.new_zeros(q.shape[0], len(block), *q.shape[2:]).index_copy_(1, at, q.index_select(1, mine))
            part, met = before.pick(mine, at, len(block)), Pair(block, pair.keys, pair.reach)
            for tile in tiles(met):
                part.add(*self.block.tile(rows, k, v, scores, met, tile), tile.rows)
            out.put(part, at, mine)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        self.block.backward(x, k, v, scores, pair, out)
