"""Block sizes: data, chosen by what a kernel holds in registers and shared memory, never by the sequence length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ring_la.kernels.sizes import width


@dataclass(frozen=True)
class Tiling:
    """Columns (or channels) a program takes, and how it is compiled."""

    block: int
    warps: int
    stages: int
    registers: int = 0  # at most, a thread; 0: the compiler's choice

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options


# Widest power of two of the two head sizes -> launch, and (rule, width) where a rule differs. Measured on an H200 at
# B 1, T 32768, 32 heads, bf16, by benchmarks.tuning.triton; entries for 64 and 256 are guesses from those for 128.
Table = dict[int | tuple[str, int], Tiling]
SUMMARISE: Table = {
    64: Tiling(64, 4, 3), 128: Tiling(128, 8, 3), 256: Tiling(64, 8, 2), ("additive_scalar", 128): Tiling(64, 4, 3)
}  # fmt: skip
# 4 warps: two programs a multiprocessor, which hides what a decay by token costs; one that is constant costs little.
ATTEND: Table = {64: Tiling(64, 4, 3), 128: Tiling(128, 8, 3), 256: Tiling(64, 8, 1)}
ATTEND_GATED: Table = {64: Tiling(64, 4, 2), 128: Tiling(64, 4, 2), 256: Tiling(64, 8, 1)}
# The pass of dq that also sums up spans: an operand more.
ATTEND_SUMS: Table = {64: Tiling(64, 4, 3), 128: Tiling(128, 8, 3)}
# The pass that leaves the chunks' states, by descriptor, from 128 channels to 128: whole states, and copies far ahead.
ATTEND_KEEP = Tiling(128, 8, 3)
WRITES: Table = {64: Tiling(64, 4, 3), 128: Tiling(128, 8, 3)}
STATES: Table = {64: Tiling(64, 4, 3), 128: Tiling(64, 4, 3)}
ADDITIVE_GRADIENT: Table = {64: Tiling(32, 4, 3), 128: Tiling(32, 4, 3)}
SUMMARY: Table = {
    64: Tiling(64, 4, 2), 128: Tiling(64, 4, 2, 168), 256: Tiling(64, 8, 1), ("delta_none", 128): Tiling(64, 4, 1, 168),
    ("delta_diagonal", 128): Tiling(64, 4, 2), ("additive_diagonal", 128): Tiling(64, 4, 2),
}  # fmt: skip
# The same where ranks take part: the first and the last span too, which three programs a multiprocessor do not hold.
SUMMARY_ALL: Table = SUMMARY | {("delta_scalar", 128): Tiling(64, 4, 2), ("delta_none", 128): Tiling(64, 4, 2)}
OUTPUT: Table = {
    64: Tiling(64, 4, 2), 128: Tiling(64, 4, 2), 256: Tiling(64, 8, 1), ("delta_diagonal", 128): Tiling(128, 8, 2),
    ("dplr_diagonal", 128): Tiling(128, 8, 2),
}  # fmt: skip
KEEP: Table = {
    64: Tiling(64, 4, 2), 128: Tiling(64, 4, 2), 256: Tiling(64, 8, 1), ("additive_diagonal", 128): Tiling(64, 4, 3)
}  # fmt: skip
BACK_SUMMARY: Table = {
    64: Tiling(64, 4, 2), 128: Tiling(64, 4, 2), 256: Tiling(64, 8, 1), ("delta_diagonal", 128): Tiling(128, 8, 2),
    ("additive_diagonal", 128): Tiling(64, 4, 3),
}  # fmt: skip
BACKWARD: Table = {
    64: Tiling(64, 4, 2), 128: Tiling(64, 4, 2), 256: Tiling(64, 8, 1), ("delta_diagonal", 128): Tiling(128, 8, 2),
    ("dplr_diagonal", 128): Tiling(128, 8, 2),
}  # fmt: skip
# The same passes where a piece is one span, so that its programs are few and what counts is how long a chunk takes.
# From benchmarks.tuning.in_order; never by rows of a batch or tokens, of which bits must not depend.
IN_ORDER_OUTPUT: Table = OUTPUT | {("delta_scalar", 128): Tiling(16, 4, 3)}
IN_ORDER_BACKWARD: Table = BACKWARD | {("delta_scalar", 128): Tiling(16, 4, 3)}
PAIRS: Table = {64: Tiling(64, 4, 2), 128: Tiling(128, 4, 1), 256: Tiling(128, 4, 1)}
GRADIENT: Table = {
    64: Tiling(64, 4, 3), 128: Tiling(64, 4, 3), 256: Tiling(64, 4, 2), ("delta_scalar", 128): Tiling(64, 4, 4)
}  # fmt: skip
# By key channels alone, always on fp32: columns of a state, or of a product of transitions, that a program takes.
PREFIX = {64: Tiling(32, 4, 2), 128: Tiling(32, 8, 2), 256: Tiling(32, 4, 1)}
PREFIX_MAPS = {64: Tiling(32, 4, 2), 128: Tiling(32, 8, 2), 256: Tiling(32, 4, 1)}
VALUE_STEP = {"none": 64, "scalar": 32}
"""Value channels a step of `delta_gradients`, without a decay and with a scalar one."""
GRADIENT_DIAGONAL: Table = {64: Tiling(32, 4, 2), 128: Tiling(32, 4, 2), 256: Tiling(32, 8, 1)}
DPLR_GRADIENT: Table = {64: Tiling(64, 8, 1), 128: Tiling(64, 8, 1), 256: Tiling(64, 8, 1)}
PRODUCTS: Table = {
    64: Tiling(64, 4, 1), 128: Tiling(128, 4, 1), 256: Tiling(64, 4, 1), ("delta_scalar", 128): Tiling(128, 4, 1, 128),
    ("delta_none", 128): Tiling(128, 4, 1, 128),
}  # fmt: skip
PRODUCTS_DIAGONAL: Table = {
    64: Tiling(32, 4, 2), 128: Tiling(32, 4, 2), 256: Tiling(32, 4, 2), ("delta_diagonal", 128): Tiling(32, 4, 3)
}  # fmt: skip

CHUNK = 64
"""Tokens a chunk; 32 in fp32."""

LEAST_CHUNKS = 4
"""Chunks a span, at least."""

SAVED_STATES = 2**30
"""Bytes of chunks' states that a forward leaves for its backward, at most; above, the backward makes them again."""

SAVED_WEIGHED = 2**26
"""The same of keys and queries weighed by decays per key channel; above, the backward weighs them again, from G: a
launch of 1.5 KB a token and head (2.5 under dplr) that keeps 0.5 KB (1 under dplr) free, 4 to 7 % of a GLA's and an
RWKV-7's forward and backward on an H200. The bound is a choice: little beside the states."""

WAVES = {"additive": 528, "delta": 264}
"""Programs wanted in a pass over spans: eight a multiprocessor of 132, two where a span's transition is dense."""


GATE_SPAN = 1024
"""Tokens a span at most where the gradient of a scalar decay is a sum over them (heads beyond 128, fp32)."""

PAIRED = True
"""Whether two heads of 64 value channels that share keys of 128 have their gradients made by one program, on Hopper."""

SLOTS = {64: 264, 128: 132, 256: 132}
"""Programs that run at a time in a pass under a scalar decay or none, by the width of heads."""

SHARED = 2**17
"""Bytes of shared memory that a program of these launches takes, at most; with less there are half the stages."""

DESCRIBED = 1 << 24
"""Elements a tensor from which tensors go by descriptor, of which each costs the host µs at a new address."""


def pick(table: Table, rule: str, K: int, V: int, dtype: torch.dtype) -> Tiling:
    """The entry for head sizes K and V; fp32 operands take half the columns and no prefetching."""
    wide = max(64, width(K), width(V))
    found = table.get((rule, wide)) or table[wide]
    if dtype == torch.float32:
        return Tiling(max(16, min(found.block, 32)), found.warps, 1)
    return found
