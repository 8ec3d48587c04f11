"""What the launches of one call share: sizes, its chunks, and how kernels are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring_la.kernels.fenwick.table import table_of
from ring_la.kernels.sizes import width
from ring_la.kernels.spans.table import Tiling

CHUNK = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Tokens a chunk: a power of two."""
SUMS = {64: Tiling(64, 4, 3), 128: Tiling(128, 8, 3)}
READS = {64: Tiling(64, 4, 2), 128: Tiling(128, 8, 2)}
BACKWARD = {64: Tiling(64, 4, 1), 128: Tiling(128, 8, 1)}
"""By the width of heads: value channels of a program (all of them in the backward pass), warps, stages."""


@dataclass(frozen=True)
class LevelsCall:
    """Sizes, scale, dtype of products; `table`, and the levels above chunks (`upper`)."""

    B: int
    T: int
    H: int
    K: int
    V: int
    L: int
    scale: float
    dtype: torch.dtype
    table: Tensor
    upper: int

    wide = torch.float32

    @classmethod
    def of(cls, q: Tensor, v: Tensor, lam: Tensor, runs: Sequence[int], scale: float) -> LevelsCall:
        B, T, H, V = v.shape
        table, upper = table_of(tuple(runs), CHUNK[v.dtype], v.device)
        return cls(B, T, H, q.shape[3], V, lam.shape[3], float(scale), v.dtype, table, upper)

    @property
    def R(self) -> int:
        """Chunks."""
        return self.table.shape[0]

    @property
    def chunk(self) -> int:
        return CHUNK[self.dtype]

    @property
    def constants(self) -> dict[str, Any]:
        precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        lower = self.chunk.bit_length()  # levels within a chunk
        sizes = dict(H=self.H, K=self.K, V=self.V, BK=width(self.K), L=self.L, C=self.chunk, LOWER=lower)
        return sizes | {"PREC": precision}

    @property
    def sums(self) -> Tiling:
        return self._pick(SUMS)

    @property
    def reads(self) -> Tiling:
        return self._pick(READS)

    @property
    def backward(self) -> Tiling:
        how = self._pick(BACKWARD)
        return Tiling(width(self.V), how.warps, how.stages)

    def _pick(self, table: dict[int, Tiling]) -> Tiling:
        how = table[max(64, width(self.K), width(self.V))]
        fp32 = self.dtype == torch.float32
        return Tiling(min(width(self.V), 32 if fp32 else how.block), how.warps, 1 if fp32 else how.stages)
