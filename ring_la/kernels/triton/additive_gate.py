"""dq and dk under a scalar decay, with what the decay's gradient needs of them: q·dq and k·dk by token.

These are `additive`'s roles dq (forward) and dk (reverse) once more, with rows for tokens: sums over channels then stay
within a warp. The pair of a token with itself, which no decay touches, is left out of the sums: in q·dq − k·dk it would
only leave its rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit(do_not_specialize=SIZES)
def attend_dots_kernel(
    X, Y, Z, F, entering, O, W, DOT, BORDER, before, leaving, EDGE, table, T, NS, NC, N, LENGTH, scale,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr,
    BX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr, HAS_STATE: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One segment and BZ columns of z; states lie in memory as [DZ, DX]. DOT [NZ, B, H, T] = out·W, W with z's heads.

    Forward also BORDER [NZ, B, H, NC], the part of a chunk's sum that comes in with the state, and `leaving`, the state
    after each piece. Reverse with a state also EDGE [NZ, B, H, NS] = <that state, the one after the segment>, the
    latter from `leaving`, or from `before`, the forward's states before the segments.
    """
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    iz = tl.program_id(0) % NZ
    s = tl.program_id(0) // NZ
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, _, last = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    d = tl.arange(0, BX)
    e = iz * BZ + tl.arange(0, BZ)
    t = tl.arange(0, C)
    x_ = head(X, b, start, h, T, HX, H, DX)
    y_ = head(Y, b, start, h, T, HY, H, DX)
    z_ = head(Z, b, start, h, T, HZ, H, DZ)
    w_ = head(W, b, start, h, T, HZ, H, DZ)
    o_ = head(O, b, start, h, T, H, H, DZ)
    f_ = F + ((b.to(tl.int64) * NC + chunk) * H + h) * (4 * C)
    row = (b.to(tl.int64) * NS + s) * H + h
    part = (iz * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    inside = (d < DX)[:, None] & (e < DZ)[None, :]
    at = e[None, :] * DX + d[:, None]
    own_state = leaving + ((b.to(tl.int64) * N + piece) * H + h) * (DX * DZ) + at
    S = tl.zeros([BX, BZ], tl.float32)
    if HAS_STATE:
        S = tl.load(entering + row * (DX * DZ) + at, inside, other=0.0)
        if REVERSE:
            after = tl.load(own_state, inside & last, other=0.0)
            after += tl.load(before + (row + H) * (DX * DZ) + at, inside & (last == 0), other=0.0)
            tl.store(EDGE + part * NS + s, tl.sum(tl.sum(S * after, 1), 0))
    n = (left + C - 1) // C
    sees = t[:, None] <= t[None, :] if REVERSE else t[:, None] >= t[None, :]  # [i, j]
    same = t[:, None] == t[None, :]
    for m in range(n):
        i = n - 1 - m if REVERSE else m
        c = i * C
        x = tile(x_ + c * (HX * DX), t, left - c, d, HX * DX, DX)
        y = tile(y_ + c * (HY * DX), t, left - c, d, HY * DX, DX)
        z = tile(z_ + c * (HZ * DZ), t, left - c, e, HZ * DZ, DZ)
        w = tile(w_ + c * (HZ * DZ), t, left - c, e, HZ * DZ, DZ).to(tl.float32)
        o = tl.dot(x, S.to(x.dtype), input_precision=PREC)
        A = tl.dot(x, tl.trans(y), input_precision=PREC) * scale
        f = f_ + i * (H * 4 * C)
        g = tl.load(f + t)
        gap = g[None, :] - g[:, None] if REVERSE else g[:, None] - g[None, :]
        A *= tl.exp2(tl.where(sees, gap, float("-inf")))
        o *= tl.load(f + (2 * C if REVERSE else C) + t)[:, None]
        zw = (z.to(tl.float32) * tl.load(f + (C if REVERSE else 2 * C) + t)[:, None]).to(z.dtype)
        S *= tl.exp2(tl.load(f + C - 1))
        if not REVERSE:
            tl.store(BORDER + part * NC + chunk + i, tl.sum(tl.sum(o * w, 1), 0))
        own = tl.sum(tl.where(same, A, 0.0), 1)
        o = tl.dot(tl.where(same, 0.0, A).to(z.dtype), z, o, input_precision=PREC)
        S = tl.dot(tl.trans(y), zw, S, input_precision=PREC)
        tl.store(DOT + part * T + start + c + t, tl.sum(o * w, 1), t < left - c)
        put(o_ + c * (H * DZ), o + own[:, None] * z.to(tl.float32), t, left - c, e, H * DZ, DZ)
    if not REVERSE:
        tl.store(own_state, S, inside & last)


@triton.jit(do_not_specialize=SIZES)
def gate_gradient_kernel(
    reads, writes, border, edge, F, out, table, T, NS, NC, LENGTH, H: tl.constexpr, NR: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, HAS_EDGE: tl.constexpr, FORGOTTEN: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """dg_t = Σ_{s≥t} (reads_s − writes_s) + E over a chunk, for BC chunks of one segment at a time from the right.

    E = <S, dS> at the chunk's end: what passes through the chunk and what it writes, W. Going left, E becomes what
    passes through and what the chunk reads from before, R (`border`). Inside the chunk reads and writes cancel but for
    R − W, so W = R − Σ (reads − writes). All of these are sums of rounded terms; where a chunk's decay is below
    2^FORGOTTEN nothing passes through, and saying so keeps the errors of one chunk out of all earlier ones.
    reads, writes [NR, B, H, T], border [NR, B, H, NC], edge [NR, B, H, NS] (E at a segment's end): partial sums.
    """
    s = tl.program_id(0)
    row = tl.program_id(1)
    b = row // H
    h = row % H
    rows = tl.num_programs(1)
    start, end, _, chunk, _, _ = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    t = tl.arange(0, C)
    c = tl.arange(0, BC)
    E = 0.0
    if HAS_EDGE:
        for i in tl.static_range(NR):
            E += tl.load(edge + (i * rows + row).to(tl.int64) * NS + s)
    n = (left + C - 1) // C
    blocks = (n + BC - 1) // BC
    for j in range(blocks):
        first = (blocks - 1 - j) * BC
        token = (first + c)[:, None] * C + t[None, :]
        live = token < left
        x = tl.zeros([BC, C], tl.float32)
        R = tl.zeros([BC], tl.float32)
        for i in tl.static_range(NR):
            at = (i * rows + row).to(tl.int64)
            x += tl.load(reads + at * T + start + token, live, other=0.0)
            x -= tl.load(writes + at * T + start + token, live, other=0.0)
            R += tl.load(border + at * NC + chunk + first + c, first + c < n, other=0.0)
        f = F + ((b.to(tl.int64) * NC + chunk + first + c) * H + h) * (4 * C) + C - 1
        passes = (tl.load(f, first + c < n, other=0.0) >= FORGOTTEN).to(tl.int32)
        D = tl.sum(x, 1)  # R − W
        gives = tl.where(passes == 1, D, R)
        # E at the end of chunk i: what the chunks after it give, up to and with the first that lets nothing through
        stops = tl.cumsum(1 - passes, 0)  # stops in chunks up to i
        before = stops - (1 - passes)  # … before i
        reaches = (c[:, None] < c[None, :]) & (stops[:, None] == before[None, :])
        ends = tl.sum(tl.where(reaches, gives[None, :], 0.0), 1)
        total = tl.sum(1 - passes, 0)
        ends += tl.where(stops == total, E, 0.0)
        through = tl.where(passes == 1, ends - (R - D), 0.0)
        dg = tl.cumsum(x, 1, reverse=True) + (through + (R - D))[:, None]
        tl.store(out + (b.to(tl.int64) * T + start + token) * H + h, dg.to(out.dtype.element_ty), live)
        E = tl.sum(tl.where(c == 0, through + R, 0.0), 0)
