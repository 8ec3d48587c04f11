"""Device helpers: a chunk's tokens, its decays both ways round, and the numbers that walks read of it.

What is needed both ways round is made so twice: nothing that came out of a product is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.fenwick.device import chunk_row, state_at
from ring_la.kernels.triton.tiles import head

SIZES = ("T", "R", "N")
"""Kernel arguments that change from call to call: no kernel is compiled anew for them."""
ROWS = tl.constexpr(9)
"""Rows of numbers a chunk, one each for its tokens: 0 and 1 weigh what tokens write to the last S and M, 2 and 3 are a
and b before a token, 4 and 5 behind it, row 6 begins with those of the whole chunk, a, b and m,
7 and 8 are 0 and 1 without η."""
SQUARES = tl.constexpr(3)
"""Squares a chunk: Γ, Γ′, and T less the identity."""


@triton.jit
def chunk(table, H: tl.constexpr, C: tl.constexpr):
    """(row, batch row, head, tokens, which are there) of a program."""
    row = tl.program_id(0)
    place, _, end, _, _, _ = chunk_row(table, row)
    token = place + tl.arange(0, C)
    return row, tl.program_id(1) // H, tl.program_id(1) % H, token, token < end


@triton.jit
def number(p, b, token, h, T, live, H: tl.constexpr):
    """A number of each token, in fp32."""
    return tl.load(head(p, b, token, h, T, H, H, 1), live, other=0.0).to(tl.float32)


@triton.jit
def rates_at(p, b, row, h, R, H: tl.constexpr, C: tl.constexpr):
    """A chunk's rows of numbers."""
    return state_at(p, b, row, h, R, H, ROWS * C)


@triton.jit
def square(p, n: tl.constexpr, b, row, h, R, H: tl.constexpr, C: tl.constexpr, TURNED: tl.constexpr = False):
    """Where square n of a chunk is, ``[C, C]``; TURNED: the other way round."""
    t = tl.arange(0, C)
    at = t[None, :] * C + t[:, None] if TURNED else t[:, None] * C + t[None, :]
    return state_at(p, b, row, h, R, H, SQUARES * C * C) + n * C * C + at


@triton.jit
def kept(g, c, t, EARLIER: tl.constexpr):
    """``[t, s]``: what is left in S at t (EARLIER: before t) of what s added."""
    if EARLIER:
        return tl.exp(tl.where(t[:, None] > t[None, :], (c - g)[:, None] - c[None, :], float("-inf")))
    return tl.exp(tl.where(t[:, None] >= t[None, :], c[:, None] - c[None, :], float("-inf")))


@triton.jit
def kept_turned(g, c, t, EARLIER: tl.constexpr):
    """The same as ``[s, t]``."""
    if EARLIER:
        return tl.exp(tl.where(t[:, None] < t[None, :], (c - g)[None, :] - c[:, None], float("-inf")))
    return tl.exp(tl.where(t[:, None] <= t[None, :], c[None, :] - c[:, None], float("-inf")))


@triton.jit
def sharp(a, b, dtype: tl.constexpr, TURNED: tl.constexpr = False):
    """a b (TURNED: a bᵀ) of factors of `dtype`, or in fp32, which take part as two of `dtype`: the nearest, and what it
    leaves."""
    x = a.to(dtype)
    y = b.to(dtype)
    out = tl.dot(x, tl.trans(y) if TURNED else y)
    if a.dtype != dtype:
        rest = (a - x.to(tl.float32)).to(dtype)
        out = tl.dot(rest, tl.trans(y) if TURNED else y, out)
    if b.dtype != dtype:
        rest = (b - y.to(tl.float32)).to(dtype)
        out = tl.dot(x, tl.trans(rest) if TURNED else rest, out)
    return out


@triton.jit
def last(x, t, C: tl.constexpr):
    """The last number of a chunk."""
    return tl.sum(tl.where(t == C - 1, x, 0.0), 0)


@triton.jit
def sum_from(x, t):
    """Running sums from the end."""
    return tl.sum(tl.where(t[:, None] <= t[None, :], x[None, :], 0.0), 1)
