"""Block sizes: data, chosen by what a kernel holds in registers and shared memory, never by the sequence length."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """Columns (or channels) a program takes, and how it is compiled."""

    block: int
    warps: int
    stages: int
    registers: int = 0  # at most, a thread; 0: the compiler's choice

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options


# Widest power of two of the two head sizes -> launch. First guesses on an H200, to be replaced by measurements.
SUMMARISE = {64: Launch(64, 4, 3), 128: Launch(128, 8, 2), 256: Launch(64, 8, 2)}
ATTEND = {64: Launch(64, 4, 2), 128: Launch(128, 8, 3), 256: Launch(64, 8, 1)}
SUMMARY = {64: Launch(64, 4, 2), 128: Launch(64, 4, 2, 168), 256: Launch(64, 8, 1)}
OUTPUT = {64: Launch(64, 4, 2), 128: Launch(128, 8, 2), 256: Launch(64, 8, 1)}
KEEP = {64: Launch(64, 4, 2), 128: Launch(64, 4, 2), 256: Launch(64, 8, 1)}
BACK_SUMMARY = {64: Launch(64, 4, 2), 128: Launch(64, 4, 2), 256: Launch(64, 8, 1)}
BACKWARD = {64: Launch(64, 4, 2), 128: Launch(128, 8, 2), 256: Launch(64, 8, 1)}
PAIRS = {64: Launch(64, 4, 2), 128: Launch(64, 4, 2), 256: Launch(64, 4, 2)}
GRADIENT = {64: Launch(64, 4, 2), 128: Launch(64, 4, 2), 256: Launch(64, 4, 2)}
GRADIENT_DIAGONAL = {64: Launch(64, 8, 1), 128: Launch(64, 8, 1), 256: Launch(64, 8, 1)}
INTRA = {64: Launch(64, 4, 1), 128: Launch(64, 4, 1), 256: Launch(64, 4, 1)}
INTRA_DIAGONAL = {64: Launch(64, 4, 1), 128: Launch(64, 4, 2), 256: Launch(64, 4, 2)}

CHUNK = 64
"""Tokens a chunk; 32 in fp32."""

LEAST = 4
"""Chunks a segment, at least."""

WAVES = {"additive": 528, "delta": 264}
"""Programs wanted in a pass over segments: eight a multiprocessor of 132, two where a segment's transition is dense."""


def width(n: int) -> int:
    """A head size as a tile is wide: the next power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def pick(table: dict[int, Launch], K: int, V: int, dtype: torch.dtype) -> Launch:
    """The entry for head sizes K and V; fp32 operands take half the columns and no prefetching."""
    launch = table[max(64, width(K), width(V))]
    if dtype == torch.float32:
        return Launch(max(16, min(launch.block, 32)), launch.warps, 1)
    return launch
