"""Device helpers: a chunk's row of the table, its tiles, decays, and the weights of its levels."""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("T", "R", "B")
"""Kernel arguments that change from call to call: no kernel is compiled anew for them."""


@triton.jit
def chunk_row(table, row):
    """(first token, start and end of the run, number of the chunk, of the run's first and last one)."""
    at = table + row * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def tile(p, live, cols, D: tl.constexpr):
    """[tokens, cols] of the rows at p; zero where there is no token or no column."""
    return tl.load(p[:, None] + cols[None, :], live[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def put(p, x, live, cols, D: tl.constexpr):
    """Store what `tile` loads."""
    tl.store(p[:, None] + cols[None, :], x.to(p.dtype.element_ty), live[:, None] & (cols < D)[None, :])


@triton.jit
def state_at(p, b, row, h, R, H: tl.constexpr, SIZE: tl.constexpr):
    """The state of a node, of ``[B, R, H, SIZE]``."""
    return p + ((b.to(tl.int64) * R + row) * H + h) * SIZE


@triton.jit
def node_at(p, b, row, h, R, d, e, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """The channels d and e of a node's state."""
    at = state_at(p, b, row, h, R, H, K * V) + d[:, None] * V + e[None, :]
    return tl.load(at, (d < K)[:, None] & (e < V)[None, :], other=0.0)


@triton.jit
def power(gap):
    """e^gap of fp64 log-decays, in fp32."""
    return tl.exp2(gap.to(tl.float32) * 1.4426950408889634)


@triton.jit
def level_weights(lam, live, t, L: tl.constexpr, LOWER: tl.constexpr, READERS: tl.constexpr):
    """What tokens of a chunk weigh for each other, ``[C, C]``: rows are the readers, or (not READERS) columns.

    `lam` are pointers to the readers' first levels, LOWER the levels within a chunk.
    """
    level = level_of(t, LOWER)
    out = tl.zeros(level.shape, tl.float32)
    for n in tl.static_range(LOWER):
        if n < L:  # beyond there is padding alone
            x = tl.load(lam + n, live, other=0.0).to(tl.float32)
            out += tl.where(level == n, x[:, None] if READERS else x[None, :], 0.0)
    return out


@triton.jit
def level_of(t, LOWER: tl.constexpr):
    """Bits of ``t xor s`` for all pairs in a chunk, ``[C, C]``."""
    apart = t[:, None] ^ t[None, :]
    level = apart * 0
    for n in tl.static_range(LOWER - 1):
        level += tl.where((apart >> n) > 0, 1, 0)
    return level
