"""What the launches of one call share, and what goes from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_la.kept import recent
from ring_la.kernels.fenwick.table import table_of
from ring_la.kernels.sizes import width

CHUNK = 64
"""Tokens a chunk."""
COLUMNS = 32
"""Columns of the states that a walk's program has: four programs a head of 128 fill an H200 from 33 heads on."""
ROWS, SQUARES = 9, 3


class Given(NamedTuple):
    """A call's tensors: q, k, p ``[B, T, H, K]``, v ``[B, T, H, V]`` of one dtype; g, mu, beta, eta ``[B, T, H]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    g: Tensor
    mu: Tensor
    beta: Tensor
    eta: Tensor


class KeptMomentum(NamedTuple):
    """What backward keeps: the chunks' squares ``[B, R, H, 3, C, C]``, their numbers, w ``[B, T, H, V]`` in fp32, and
    S and M before each chunk ``[B, R, H, K, V]``."""

    squares: Tensor
    rates: Tensor
    w: Tensor
    S: Tensor
    M: Tensor


@dataclass(frozen=True)
class ChunksCall:
    """Sizes of a call whose rows have documents with these offsets."""

    B: int
    T: int
    H: int
    K: int
    V: int
    cu: tuple[int, ...]
    scale: float
    dtype: torch.dtype
    device: torch.device

    wide = torch.float32

    @property
    def N(self) -> int:
        """Documents of a row."""
        return len(self.cu) - 1

    @property
    def table(self) -> Tensor:
        """The chunks of a row."""
        runs = tuple(n for a, b in zip(self.cu, self.cu[1:]) if b > a for n in (a, b, 0))
        return table_of(runs, CHUNK, self.device)[0]

    @property
    def documents(self) -> Tensor:
        return _documents(self.cu, self.device)

    @property
    def R(self) -> int:
        """Chunks of a row."""
        return sum(-((a - b) // CHUNK) for a, b in zip(self.cu, self.cu[1:]))

    @property
    def constants(self) -> dict[str, Any]:
        return dict(H=self.H, K=self.K, V=self.V, BK=width(self.K), C=CHUNK)

    @property
    def chunks(self) -> dict[str, Any]:
        """Of kernels with a chunk a program."""
        return dict(self.constants, BV=width(self.V), num_warps=8)

    @property
    def walks(self) -> dict[str, Any]:
        return dict(self.constants, BV=min(COLUMNS, width(self.V)), ROWED=self.B > 1, num_warps=4)

    @property
    def walk_grid(self) -> tuple[int, int]:
        return -(-self.V // min(COLUMNS, width(self.V))), self.B * self.H * self.N

    def tokens(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for ``[B, T, H, …]``."""
        return torch.empty(self.B, self.T, self.H, *shape, dtype=dtype or self.dtype, device=self.device)

    def nodes(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for ``[B, R, H, …]``."""
        return torch.empty(self.B, self.R, self.H, *shape, dtype=dtype or self.dtype, device=self.device)

    def states(self) -> list[Tensor]:
        """Room for S and M of each document."""
        size = (max(self.B, self.N), self.H, self.K, self.V)
        return [torch.zeros(size, dtype=self.wide, device=self.device) for _ in range(2)]


@recent(256)
def _documents(cu: tuple[int, ...], device: torch.device) -> Tensor:
    """First chunk, chunks, start and end of each document."""
    rows, at = [], 0
    for a, b in zip(cu, cu[1:]):
        rows.append((at, -((a - b) // CHUNK), a, b))
        at += rows[-1][1]
    return torch.tensor(rows, dtype=torch.int32).to(device)
