"""Log-decays: their running sum inside a chunk, in units of ln 2, and the gradient that comes back through it.

With G the running sum of g over a chunk, every decay of the chunk is exp of a difference of two G, and the gradient of
g_t is the sum of G's gradient over the tokens from t to the chunk's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.tiles import SIZES, span


@triton.jit
def running(g, C: tl.constexpr, PREC: tl.constexpr):
    """Σ g / ln 2 over the tokens up to each, [C, D], as a product with ones: the terms are exact, the sum fp32."""
    t = tl.arange(0, C)
    ones = t[:, None] >= t[None, :]
    if PREC == "tf32x3":
        G = tl.dot(ones.to(tl.float32), g.to(tl.float32), input_precision=PREC)
    elif g.dtype != tl.float32:
        G = tl.dot(ones.to(g.dtype), g)
    else:  # in three parts of eight bits, the smallest first: tensor cores take fp32 only by the long way
        ones = ones.to(tl.bfloat16)
        part = g.to(tl.bfloat16)
        rest = g - part.to(tl.float32)
        second = rest.to(tl.bfloat16)
        G = tl.dot(ones, (rest - second.to(tl.float32)).to(tl.bfloat16))
        G = tl.dot(ones, second, G)
        G = tl.dot(ones, part, G)
    return G * 1.4426950408889634


@triton.jit(do_not_specialize=SIZES)
def factors_kernel(
    g, beta, out, table, T, NC, scale, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, STATIC: tl.constexpr,
    STRONG: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """By token, chunk by chunk [B, NC, H, 4, C]: G / ln 2, scale · e^G, e^{G_C − G} of a scalar decay; the last row is
    for the delta rules' β (`chunk_factors`). STATIC: g has one decay a head for all tokens, [H]. STRONG: the third row
    comes times β [B, T, H], which is the last.

    Past a chunk's end G stays what it was and β is 0, so that whole rows are read without asking where it ends.
    """
    s = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    b = tl.program_id(2).to(tl.int64)
    start, end, _, _, _, _ = span(table, s, T, C, C, VARLEN)
    t = tl.arange(0, C)
    live = (start + t < end)[None, :] & (h < H)[:, None]
    token = (b * T + start + t)[None, :] * H + h[:, None]
    at = ((b * NC + s) * H + h)[:, None] * (4 * C) + t[None, :]
    inside = (h < H)[:, None] & (t < C)[None, :]
    gate = token * 0 + h[:, None] if STATIC else token
    x = tl.load(g + gate, live, other=0.0).to(tl.float32) * 1.4426950408889634
    G = tl.cumsum(x, 1)
    tl.store(out + at, G, inside)
    tl.store(out + at + C, tl.exp2(G) * scale, inside)
    rest = tl.exp2(tl.cumsum(x, 1, reverse=True) - x)
    if STRONG:
        be = tl.load(beta + token, live, other=0.0).to(tl.float32)
        tl.store(out + at + 3 * C, be, inside)
        rest *= be
    tl.store(out + at + 2 * C, rest, inside)


LEAST = tl.constexpr(2.0**-60)
LEAST_HALF = tl.constexpr(2.0**-6)
"""The smallest β that what was multiplied by it is divided by again; in fp16, whose range is narrow."""


@triton.jit
def divisor(beta, dtype: tl.constexpr):
    """β, but no closer to 0 than what was multiplied by it in `dtype` can be divided by again."""
    least: tl.constexpr = LEAST_HALF if dtype == tl.float16 else LEAST
    return tl.where(tl.abs(beta) < least, least, beta)


@triton.jit
def share(beta, dtype: tl.constexpr):
    """β over its `divisor`; but for fp16 nobody sees that it is not 1."""
    return beta / divisor(beta, dtype) if dtype == tl.float16 else 1.0


@triton.jit
def chunk_factors(
    g, beta, f, token, t, n, h, H: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr
):
    """(G / ln 2, β) of one head's chunk, whose first token is `token` of B · T; f ← all rows of `factors_kernel`.
    Without a decay G is β."""
    at = (token + t) * H + h
    be = tl.load(beta + at, t < n, other=0.0).to(tl.float32)
    tl.store(f + 3 * C + t, be)
    G = be
    if GATED:
        x = tl.load(g + (at * 0 + h if STATIC else at), t < n, other=0.0).to(tl.float32) * 1.4426950408889634
        G = tl.cumsum(x, 0)
        tl.store(f + t, G)
        tl.store(f + C + t, tl.exp2(G))
        tl.store(f + 2 * C + t, tl.exp2(tl.cumsum(x, 0, reverse=True) - x))
    return G, be
