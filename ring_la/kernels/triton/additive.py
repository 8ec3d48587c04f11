"""Additive writes under a scalar decay or none: S_t = e^{g_t} S_{t−1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t.

The output and all three gradients are one operation, here `attend`, with the roles exchanged (x reads, y writes, z is
what is written; F holds the factors of the running log-decay of a chunk, S the state between chunks):

    forward   out_i = c_r e^{G_i} Sᵀx_i + c Σ_{j≤i} e^{G_i−G_j} (x_i·y_j) z_j     o: (q, k, v)    dq: (do, v, k)
    reverse   out_i = e^{G_C−G_i} Sᵀx_i + c Σ_{j≥i} e^{G_j−G_i} (x_i·y_j) z_j     dv: (k, q, do)  dk: (v, do, q)

dq reads the forward state and dk the adjoint state transposed. A segment carries its state in registers, so no state
between chunks reaches memory (GLA, Yang et al. 2024, arXiv:2312.06635, materialises every chunk's or recomputes them;
the linear-attention form of the gradients is theirs). The log-decay's gradient needs only q·dq and k·dk = v·dv by
token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit(do_not_specialize=SIZES)
def summarise_kernel(
    Y, Z, F, b_, log_a, table, T, NS, NC, LENGTH, scale, H: tl.constexpr, HY: tl.constexpr, HZ: tl.constexpr,
    DY: tl.constexpr,
    DZ: tl.constexpr, BY: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
    REVERSE: tl.constexpr, ALL: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What a segment adds to the state, b [B, NS, H, DY, DZ], and its log-decay; not ALL: leave out the scan's last."""
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    iz = tl.program_id(0) % NZ
    s = tl.program_id(0) // NZ
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, _, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    if end <= start:
        return
    if not ALL and (first if REVERSE else last):
        return
    d = tl.arange(0, BY)
    e = iz * BZ + tl.arange(0, BZ)
    t = tl.arange(0, C)
    y_ = head(Y, b, start, h, T, HY, H, DY)
    z_ = head(Z, b, start, h, T, HZ, H, DZ)
    f_ = F + ((b.to(tl.int64) * NC + chunk) * H + h) * (4 * C)
    S = tl.zeros([BZ, BY], tl.float32)
    total = 0.0
    left = end - start
    n = (left + C - 1) // C
    for j in range(n):
        i = n - 1 - j if REVERSE else j
        c = i * C
        y = tile(y_ + c * (HY * DY), t, left - c, d, HY * DY, DY)
        z = tile(z_ + c * (HZ * DZ), t, left - c, e, HZ * DZ, DZ)
        zw = tl.trans(z)
        if GATED:
            f = f_ + i * (H * 4 * C)
            keep = tl.load(f + (C if REVERSE else 2 * C) + t)
            gc = tl.load(f + C - 1)
            zw = (zw.to(tl.float32) * keep[None, :]).to(z.dtype)
            S *= tl.exp2(gc)
            total += gc
        S = tl.dot(zw, y, S, input_precision=PREC)
    if REVERSE and not GATED:
        S *= scale
    row = (b.to(tl.int64) * NS + s) * H + h
    tl.store(b_ + row * (DY * DZ) + d[None, :] * DZ + e[:, None], S, (d < DY)[None, :] & (e < DZ)[:, None])
    if GATED and iz == 0:
        tl.store(log_a + row, total)


@triton.jit(do_not_specialize=SIZES)
def attend_kernel(
    X, Y, Z, F, entering, O, leaving, table, T, NS, NC, N, LENGTH, scale, H: tl.constexpr, HX: tl.constexpr,
    HY: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr, BX: tl.constexpr, BZ: tl.constexpr,
    C: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_STATE: tl.constexpr,
    LEAVE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """The operation above for one segment and BZ columns of z.

    The state is held as Sᵀ [BZ, BX]: as the left operand of a product it never leaves the registers. TRANSPOSED: states
    lie in memory as [DZ, DX]. LEAVE stores the scan's last state.
    """
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    iz = tl.program_id(0) % NZ
    s = tl.program_id(0) // NZ
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    if end <= start:
        return
    d = tl.arange(0, BX)
    e = iz * BZ + tl.arange(0, BZ)
    t = tl.arange(0, C)
    x_ = head(X, b, start, h, T, HX, H, DX)
    y_ = head(Y, b, start, h, T, HY, H, DX)
    z_ = head(Z, b, start, h, T, HZ, H, DZ)
    o_ = head(O, b, start, h, T, H, H, DZ)
    f_ = F + ((b.to(tl.int64) * NC + chunk) * H + h) * (4 * C)
    row = (b.to(tl.int64) * NS + s) * H + h
    inside = (e < DZ)[:, None] & (d < DX)[None, :]
    at = e[:, None] * DX + d[None, :] if TRANSPOSED else d[None, :] * DZ + e[:, None]
    S = tl.zeros([BZ, BX], tl.float32)
    if HAS_STATE:
        S = tl.load(entering + row * (DX * DZ) + at, inside, other=0.0)
    n = (end - start + C - 1) // C
    left = end - start
    causal = t[:, None] >= t[None, :] if REVERSE else t[:, None] <= t[None, :]  # [j, i]
    for m in range(n):
        i = n - 1 - m if REVERSE else m
        c = i * C
        x = tile(x_ + c * (HX * DX), t, left - c, d, HX * DX, DX)
        y = tile(y_ + c * (HY * DX), t, left - c, d, HY * DX, DX)
        z = tile(z_ + c * (HZ * DZ), t, left - c, e, HZ * DZ, DZ)
        A = tl.dot(y, tl.trans(x), input_precision=PREC) * scale
        o = tl.dot(S.to(x.dtype), tl.trans(x), input_precision=PREC)
        zw = tl.trans(z)
        if GATED:
            f = f_ + i * (H * 4 * C)
            g = tl.load(f + t)
            gc = tl.load(f + C - 1)
            gap = g[:, None] - g[None, :] if REVERSE else g[None, :] - g[:, None]
            A *= tl.exp2(tl.where(causal, gap, float("-inf")))
            o *= tl.load(f + (2 * C if REVERSE else C) + t)[None, :]
            zw = (zw.to(tl.float32) * tl.load(f + (C if REVERSE else 2 * C) + t)[None, :]).to(z.dtype)
            S *= tl.exp2(gc)
        else:
            A = tl.where(causal, A, 0.0)
            if REVERSE:
                zw = (zw.to(tl.float32) * scale).to(z.dtype)
            else:
                o *= scale
        o = tl.dot(tl.trans(z), A.to(z.dtype), o, input_precision=PREC)
        S = tl.dot(zw, y, S, input_precision=PREC)
        put(o_ + c * (H * DZ), tl.trans(o), t, left - c, e, H * DZ, DZ)
    if LEAVE and (first if REVERSE else last):
        own = ((b.to(tl.int64) * N + piece) * H + h) * (DX * DZ)
        tl.store(leaving + own + at, S, inside)
