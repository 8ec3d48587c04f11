"""Pieces cut into runs of at most `length` tokens, described on the device.

`cu` holds the offsets of the pieces. How many runs there are is known only on the device, so a launch covers the upper
bound T // length + N and the programs beyond the real count find an empty run (`tiles.span`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import SIZES


@triton.jit(do_not_specialize=SIZES)
def cut_kernel(cu, table, pieces, LENGTH, C: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr):
    n = tl.program_id(0)
    runs = 0
    chunks = 0
    for m in range(0, n, BN):
        i = m + tl.arange(0, BN)
        size = tl.load(cu + i + 1, i < n, other=0) - tl.load(cu + i, i < n, other=0)
        runs += tl.sum((size + LENGTH - 1) // LENGTH, 0).to(tl.int32)
        chunks += tl.sum((size + C - 1) // C, 0).to(tl.int32)
    begin = tl.load(cu + n).to(tl.int32)
    end = tl.load(cu + n + 1).to(tl.int32)
    count = (end - begin + LENGTH - 1) // LENGTH
    tl.store(pieces + n * 2, runs)
    tl.store(pieces + n * 2 + 1, count)
    for m in range(0, count, BS):
        i = m + tl.arange(0, BS)
        live = i < count
        row = table + (runs + i) * 6
        tl.store(row, begin + i * LENGTH, live)
        tl.store(row + 1, tl.minimum(begin + (i + 1) * LENGTH, end), live)
        tl.store(row + 2, tl.zeros([BS], tl.int32) + n, live)
        tl.store(row + 3, chunks + i * (LENGTH // C), live)
        tl.store(row + 4, (i == 0).to(tl.int32), live)
        tl.store(row + 5, (i == count - 1).to(tl.int32), live)


@dataclass(frozen=True)
class Runs:
    """Runs of at most `length` tokens (a multiple of the chunk) of every piece; `count` bounds their number."""

    length: int
    chunk: int
    count: int
    pieces: int
    table: Tensor | None  # int32 [count, 6], see `tiles.span`; None: one piece, arithmetic suffices
    first: Tensor | None  # int32 [pieces, 2]: first run of each piece, and how many it has

    @classmethod
    def of(cls, T: int, length: int, chunk: int, cu: Tensor | None) -> Runs:
        if cu is None:
            return cls(length, chunk, -(-T // length), 1, None, None)
        n = cu.numel() - 1
        count = T // length + n
        table = torch.zeros(count, 6, dtype=torch.int32, device=cu.device)
        first = torch.empty(n, 2, dtype=torch.int32, device=cu.device)
        launch(cut_kernel, (n,), cu, table, first, length, C=chunk, BN=256, BS=64)
        return cls(length, chunk, count, n, table, first)
