"""What the launches of one call share, and what goes from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.sizes import cdiv, width

MINI_BATCHES = (16, 32, 64)
"""Sizes that there are kernels for."""
CHUNK, CHUNK_FP32 = 64, 32
"""Tokens a chunk: whole mini-batches."""


class KeptSteps(NamedTuple):
    """d ``[B, T, H, K]``, and before each chunk W (as ``[V, K]``) and c."""

    d: Tensor
    W: Tensor
    c: Tensor


class Prepared(NamedTuple):
    """What `backwards` reads: dz times the scale, the part of dd from the mini-batch's own outputs, the norm's x (all
    ``[B, T, H, K]``), one over its deviation, and the means of e and of e times x ``[B, T, H]``."""

    dz: Tensor
    dd: Tensor
    hat: Tensor
    over: Tensor
    mean: Tensor
    along: Tensor


@dataclass(frozen=True)
class StepsCall:
    """Sizes of a call of T = NB · N tokens, N a mini-batch."""

    B: int
    T: int
    H: int
    K: int
    N: int
    scale: float
    eps: float
    dtype: torch.dtype

    wide = torch.float32

    @property
    def NB(self) -> int:
        """Mini-batches."""
        return self.T // self.N

    @property
    def chunk(self) -> int:
        return max(self.N, CHUNK_FP32 if self.dtype == torch.float32 else CHUNK)

    @property
    def NC(self) -> int:
        """Chunks."""
        return cdiv(self.T, self.chunk)

    @property
    def constants(self) -> dict[str, Any]:
        precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        return dict(H=self.H, K=self.K, BK=width(self.K), N=self.N, C=self.chunk, PREC=precision)

    @property
    def walk_warps(self) -> int:
        """A warp group for 64 rows of the model."""
        return 8 if width(self.K) > 64 else 4
