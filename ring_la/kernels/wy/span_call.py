"""What kernels take that go over spans of a head's tokens (`kda_launches`, `gdn_launches`, `gla_launches`,
`dplr_launches`): one device's tokens, cut into spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ring_la.kernels import gpu
from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.spans.runs import Runs

if TYPE_CHECKING:
    from typing_extensions import Self

CHUNK, HEAD = 32, 128
"""Tokens a chunk (KDA's are smaller), and channels of a head."""
Cut = Callable[[int, int, int, int, bool], tuple[int, int]]
"""Tokens a span and of a row's outer one, by tokens of all pieces, heads, pieces, programs that run at a time, and
whether all pieces have as many tokens."""


def side_by_side(programs: int, device: torch.device) -> bool:
    """Whether they all run at once, as these kernels fill a multiprocessor each: none has to take its number in the
    order that they begin in."""
    return programs <= gpu.multiprocessors(device)


def as_read(inputs: Inputs) -> Inputs:
    """Inputs as these kernels read them: contiguous; q, k, a, b in the dtype of v, gates and steps in fp32 or bf16."""
    q, k, v, g, beta, a, b = (None if x is None else aligned(x) for x in inputs)
    q, k, a, b = (x if x is None or x.dtype == v.dtype else x.to(v.dtype) for x in (q, k, a, b))
    g, beta = (x if x is None or x.dtype in (torch.float32, torch.bfloat16) else x.float() for x in (g, beta))
    return Inputs(q, k, v, g, beta, a, b)


def chunk_count(rows: int, tokens: int, cu: Tensor | None, chunk: int) -> int:
    """How many chunks of so many tokens there are at most."""
    return rows * cdiv(tokens, chunk) if cu is None else tokens // chunk + cu.numel() - 1


@dataclass(frozen=True)
class SpanCall:
    """One device's tokens, as a rule's kernels take them.

    Attributes:
        chunk: tokens of one.
        inputs: as `as_read` leaves them, batch rows one behind the other.
        pieces: documents, or batch rows. length: tokens a span. count, chunks: how many spans and chunks at most.
        outer: tokens of a row's first span (backward, but for KDA: its last), where rows are cut evenly but for it.
        runs: the spans of packed documents; None: rows are cut evenly.
    """

    chunk: ClassVar[int] = CHUNK

    inputs: Inputs
    cu: Tensor | None
    scale: float
    pieces: int
    length: int
    outer: int
    count: int
    chunks: int
    runs: Runs | None

    @classmethod
    def of(cls, inputs: Inputs, cu: Tensor | None, scale: float, cut: Cut) -> Self:
        inputs = as_read(inputs)
        v = inputs.v
        B, T, H = v.shape[:3]
        pieces, chunks = B if cu is None else cu.numel() - 1, chunk_count(B, T, cu, cls.chunk)
        length, outer = cut(B * T, H, pieces, gpu.multiprocessors(v.device), cu is None)
        if cu is None:
            count = B * (1 + cdiv(max(T - outer, 0), length))
            return cls(inputs, None, scale, pieces, length, outer, count, chunks, None)
        cu = aligned(cu.to(device=v.device, dtype=torch.int32))
        runs = Runs.of(T, length, cls.chunk, cu)
        return cls(inputs, cu, scale, pieces, length, length, runs.count, chunks, runs)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.inputs.v.device, dtype=dtype)

    def states(self) -> Tensor:
        """Room for the state of every piece."""
        return self.new(self.pieces, self.inputs.v.shape[2], HEAD, HEAD)

    def results(self) -> Inputs:
        """Room for the inputs' gradients; q's and k's have the heads of v."""
        v, g = self.inputs.v, self.inputs.g
        dq, dk, dv = (self.new(*v.shape, dtype=torch.bfloat16) for _ in range(3))
        return Inputs(dq, dk, dv, None if g is None else torch.empty_like(g), self.new(*v.shape[:3]))


def by_row(states: Tensor, rows: int) -> Tensor:
    """States of pieces ``[N, H, K, V]`` by batch row: each has one piece, or the only one all."""
    return states[:, None] if rows > 1 else states[None]
