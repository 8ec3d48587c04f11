"""Pairs of tokens under a decay per key channel, by levels.

Such a decay cannot leave the product Σ_d x_td y_sd e^{G_td−G_sd}, and e^{−G_s} may overflow. Pairs inside blocks of 2^m
tokens over which G varies little (`reach`) take the block's middle as reference. Every other pair (t, s) is computed at
the level of the smallest aligned block that holds both, t in its later half and s in its earlier one: with the border's
G as reference both factors are at most 1. Either way a level is one product of whole tiles; with gates near 1 there is
only one, and with gates so strong that m = 0 there are log2 C.

`reach` and a middle look at tokens behind a row. Where no row may depend on them (`kernels.in_order`) rows `near_start`
take the chunk's start as reference, and the others go by all levels, whose borders lie before them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ring_la.kernels.spans.plan import SpanPlan


@triton.jit
def level_mask(t, i):
    """[t, s]: t in the later and s in the earlier half of one aligned block of 2^{i+1} tokens."""
    same = (t[:, None] >> (i + 1)) == (t[None, :] >> (i + 1))
    return same & (((t[:, None] >> i) & 1) == 1) & (((t[None, :] >> i) & 1) == 0)


@triton.jit
def direct_mask(t, m):
    """[t, s]: s before t in one aligned block of 2^m tokens: the pairs no level from m on holds."""
    return ((t[:, None] >> m) == (t[None, :] >> m)) & (t[:, None] > t[None, :])


@triton.jit
def level_border(t, n, i):
    """The last token of the earlier half of t's block at level i."""
    return tl.minimum(((t >> (i + 1)) << (i + 1)) + (1 << i) - 1, n - 1)


@triton.jit
def middle(t, n, m):
    """The middle token of t's block of 2^m."""
    return tl.minimum(((t >> m) << m) + ((1 << m) >> 1), n - 1)


@triton.jit
def gates_at(g_, rows, d, STRIDE: tl.constexpr, D: tl.constexpr):
    """G of the given tokens."""
    return tl.load(g_ + rows[:, None] * STRIDE + d[None, :], (d < D)[None, :], other=0.0)


@triton.jit
def reach(G, g_, t, n, d, STRIDE: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr):
    """The largest m for which no token of an aligned block of 2^m is LIMIT or more from its middle, in powers of two.

    Inside such blocks one reference serves all pairs: the factors 2^{±LIMIT} stay far inside the exponents' range.
    """
    m = LEVELS
    spread = tl.max(tl.max(tl.abs(G - gates_at(g_, middle(t, n, m), d, STRIDE, D)), 1), 0)
    while spread > LIMIT:
        m -= 1
        spread = tl.max(tl.max(tl.abs(G - gates_at(g_, middle(t, n, m), d, STRIDE, D)), 1), 0)
    return m


@triton.jit
def near_start(G, START: tl.constexpr):
    """Which tokens are, like all before them, at most START powers of two from the chunk's start."""
    return tl.cumsum((tl.min(G, 1) < -START).to(tl.int32), 0) == 0


@triton.jit
def spread_of(G, near, t, half, LIMIT: tl.constexpr):
    """How far tokens are from the chunk's middle; beyond LIMIT where one is not `near_start`."""
    spread = tl.max(tl.max(tl.abs(G - row_of(G, t, half)[None, :]), 1), 0)
    return tl.where(tl.min(near.to(tl.int32), 0) == 1, spread, 2.0 * LIMIT)


@triton.jit
def border_weight(g, g_, t, n, d, i, STRIDE: tl.constexpr, D: tl.constexpr):
    """What both sides of the pairs of level i are weighed by: the decay between them and the border."""
    return tl.exp2(-tl.abs(g - gates_at(g_, level_border(t, n, i), d, STRIDE, D)))


@triton.jit
def level_weights(g, g_, t, n, d, low, i, STRIDE: tl.constexpr, D: tl.constexpr):
    """(e^{G − ref}, e^{ref − G}, mask) of the pairs of level i; below `low`, of those that share a block's middle."""
    if i < low:
        up = g - gates_at(g_, middle(t, n, low), d, STRIDE, D)
        down = tl.exp2(-up)
        up = tl.exp2(up)
        mask = direct_mask(t, low)
    else:
        up = border_weight(g, g_, t, n, d, i, STRIDE, D)
        down = up
        mask = level_mask(t, i)
    return up, down, mask


@triton.jit
def nearest(x, PREC: tl.constexpr):
    """x as a product in tf32 takes it, but rounded: the product itself drops the last 13 bits, and all it gives is then
    too small. A NaN stays one."""
    if PREC == "tf32":
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FC00000) + 0x1000
        x = (bits & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def row_of(x, t, i):
    """Row i of x, by token t."""
    return tl.sum(tl.where((t == i)[:, None], x, 0.0), 0)


START = 80
"""How far, in powers of two, a row may be from the chunk's start to take it as reference (`near_start`)."""


def level_count(plan: SpanPlan) -> int:
    """Levels of a chunk."""
    return plan.chunk.bit_length() - 1


def limit(plan: SpanPlan) -> int:
    """How far, in powers of two, a token may be from a reference it shares (`reach`)."""
    return 4 if plan.dtype == torch.float16 else 48
