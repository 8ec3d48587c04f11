"""Log-decays: their running sum inside a chunk, in units of ln 2, and the gradient that comes back through it.

With G the running sum of g over a chunk, every decay of the chunk is exp of a difference of two G, and the gradient of
g_t is the sum of G's gradient over the tokens from t to the chunk's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.tiles import SIZES, span


@triton.jit(do_not_specialize=SIZES)
def cumulate_kernel(g, out, table, T, WIDTH, C: tl.constexpr, BW: tl.constexpr, VARLEN: tl.constexpr):
    """out[t] = Σ g / ln 2 over the tokens of t's chunk up to t. g and out are [B, T, WIDTH]: heads × key channels."""
    s = tl.program_id(0)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    start, end, _, _, _, _ = span(table, s, T, C, C, VARLEN)
    t = start + tl.arange(0, C)
    at = (tl.program_id(2).to(tl.int64) * T + t)[:, None] * WIDTH + w[None, :]
    live = (t < end)[:, None] & (w < WIDTH)[None, :]
    x = tl.load(g + at, live, other=0.0).to(tl.float32)
    tl.store(out + at, tl.cumsum(x, 0) * 1.4426950408889634, live)


@triton.jit(do_not_specialize=SIZES)
def factors_kernel(
    g, beta, out, table, T, NC, H, scale, C: tl.constexpr, BH: tl.constexpr, GATED: tl.constexpr, DELTA: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """By token, chunk by chunk [B, NC, H, 4, C]: G / ln 2, scale · e^G, e^{G_C − G} of a scalar decay, and β.

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
    if GATED:
        x = tl.load(g + token, live, other=0.0).to(tl.float32) * 1.4426950408889634
        G = tl.cumsum(x, 1)
        tl.store(out + at, G, inside)
        tl.store(out + at + C, tl.exp2(G) * scale, inside)
        tl.store(out + at + 2 * C, tl.exp2(tl.cumsum(x, 1, reverse=True) - x), inside)
    if DELTA:
        tl.store(out + at + 3 * C, tl.load(beta + token, live, other=0.0).to(tl.float32), inside)


@triton.jit(do_not_specialize=SIZES)
def gate_gradient_kernel(
    reads, writes, border, edge, F, out, table, T, H, NS, NC, LENGTH, NR: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, FORGOTTEN: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """dg_t = Σ_{s≥t} (reads_s − writes_s) + E over a chunk; reads = q·dq and writes = k·dk, by token.

    E = <S, dS> at the chunk's end: what passes through the chunk and what it writes, W. Going left, E becomes what
    passes through and what the chunk reads from before, R (`border`). Inside the chunk reads and writes cancel but for
    R − W, so W = R − Σ (reads − writes). All of these are sums of rounded terms; where a chunk's decay is below
    2^FORGOTTEN nothing passes through, and saying so keeps the errors of one chunk out of all earlier ones.
    reads, writes [NR, B, T, H], border [NR, B, NC, H], edge [NR, B, NS, H] (E at a segment's end) are partial sums.
    """
    s = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    b = tl.program_id(2).to(tl.int64)
    B = tl.num_programs(2)
    start, end, _, chunk, _, _ = span(table, s, T, LENGTH, C, VARLEN)
    E = tl.zeros([BH], tl.float32)
    for i in tl.static_range(NR):
        E += tl.load(edge + ((i * B + b) * NS + s) * H + h, h < H, other=0.0)
    n = (end - start + C - 1) // C
    for j in range(n):
        c = n - 1 - j
        t = start + c * C + tl.arange(0, C)
        live = (t < end)[:, None] & (h < H)[None, :]
        x = tl.zeros([C, BH], tl.float32)
        R = tl.zeros([BH], tl.float32)
        for i in tl.static_range(NR):
            at = ((i * B + b) * T + t)[:, None] * H + h[None, :]
            x += tl.load(reads + at, live, other=0.0) - tl.load(writes + at, live, other=0.0)
            R += tl.load(border + ((i * B + b) * NC + chunk + c) * H + h, h < H, other=0.0)
        decay = tl.load(F + ((b * NC + chunk + c) * H + h) * (4 * C) + C - 1, h < H, other=0.0)
        W = R - tl.sum(x, 0)
        through = tl.where(decay < FORGOTTEN, 0.0, E - W)
        y = tl.cumsum(x, 0, reverse=True) + (through + W)[None, :]
        tl.store(out + (b * T + t)[:, None] * H + h[None, :], y.to(out.dtype.element_ty), live)
        E = through + R
