"""Device helpers: what one program owns, and its loads.

A *span* is a run of whole chunks of one piece, a *chunk* at most C tokens of one span. Tensors are contiguous
[B, T, H, D]; offsets of a tile's base are 64-bit, offsets inside a tile 32-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("T", "NS", "NC", "N", "LENGTH", "WIDTH")
"""Kernel arguments that change from call to call: no kernel is compiled anew for them."""


@triton.jit
def span(table, s, T, LENGTH, C: tl.constexpr, VARLEN: tl.constexpr):
    """(start, end, piece, number of the first chunk, is first, is last) of span `s`; end == start if unused."""
    if VARLEN:
        row = table + s * 6
        start = tl.load(row)
        end = tl.load(row + 1)
        piece = tl.load(row + 2)
        chunk = tl.load(row + 3)
        first = tl.load(row + 4) != 0
        last = tl.load(row + 5) != 0
    else:
        start = s * LENGTH
        end = tl.minimum(start + LENGTH, T)
        piece = 0
        chunk = start // C
        first = start == 0
        last = end == T
    return start, end, piece, chunk, first, last


@triton.jit
def chunk_of(table, s, T, H: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr):
    """(batch, head, first token, tokens) of chunk `s` for a program of row `tl.program_id(1)` of batch × heads."""
    row = tl.program_id(1)
    start, end, _, _, _, _ = span(table, s, T, C, C, VARLEN)
    return row // H, row % H, start, end - start


@triton.jit
def entry(b, s, h, N, H: tl.constexpr):
    """Where (b, s, h) lies in a tensor [B, N, H], in 64 bits."""
    return (b.to(tl.int64) * N + s) * H + h


@triton.jit
def head(p, b, t, h, T, H: tl.constexpr, HV: tl.constexpr, D: tl.constexpr):
    """Pointers to tokens t, one or several, of the head (of H) that value head h (of HV) reads, rows D wide."""
    return p + ((b.to(tl.int64) * T + t) * H + h // (HV // H)) * D


@triton.jit
def within(rows, n, cols, D: tl.constexpr):
    """Which of [rows, cols] lie inside n rows of D columns; columns are not asked about where the tile divides D."""
    if (cols.shape[0] * 0 + D) % cols.shape[0] == 0:  # a constant, also under the interpreter
        return (rows < n)[:, None]
    else:
        return (rows < n)[:, None] & (cols < D)[None, :]


@triton.jit
def tile(p, rows, n, cols, STRIDE: tl.constexpr, D: tl.constexpr):
    """[rows, cols] of a row-major matrix; zero beyond n rows and D columns."""
    return tl.load(p + rows[:, None] * STRIDE + cols[None, :], within(rows, n, cols, D), other=0.0)


@triton.jit
def put(p, x, rows, n, cols, STRIDE: tl.constexpr, D: tl.constexpr):
    """Store what `tile` loads."""
    tl.store(p + rows[:, None] * STRIDE + cols[None, :], x.to(p.dtype.element_ty), within(rows, n, cols, D))
