"""Additive writes under a scalar decay or none: S_t = e^{g_t} S_{t−1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t.

The output and all three gradients are one operation, here `attend`, with the roles exchanged (x reads, y writes, z is
what is written; G the running log-decay of a chunk, S the state between chunks):

    forward   out_i = c_r e^{G_i} Sᵀx_i + c Σ_{j≤i} e^{G_i−G_j} (x_i·y_j) z_j     o: (q, k, v)    dq: (do, v, k)
    reverse   out_i = e^{G_C−G_i} Sᵀx_i + c Σ_{j≥i} e^{G_j−G_i} (x_i·y_j) z_j     dv: (k, q, do)  dk: (v, do, q)

dq reads the forward state and dk the adjoint state transposed. A segment carries its state in registers, so no state
between chunks reaches memory (GLA, Yang et al. 2024, arXiv:2312.06635, materialises every chunk's or recomputes them;
the linear-attention form of the gradients is theirs). The log-decay's gradient needs only q·dq and k·dk = v·dv by token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit(do_not_specialize=SIZES)
def summarise_kernel(
    Y, Z, G, b_, log_a, table, T, NS, LENGTH, scale, H: tl.constexpr, HY: tl.constexpr, HZ: tl.constexpr, DY: tl.constexpr,
    DZ: tl.constexpr, BY: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
    REVERSE: tl.constexpr, ALL: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What a segment adds to the state, b [B, NS, H, DY, DZ], and its log-decay; not ALL: leave out the scan's last."""
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    iz = tl.program_id(0) % NZ
    s = tl.program_id(0) // NZ
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, _, _, first, last = span(table, s, T, LENGTH, C, VARLEN)
    if end <= start:
        return
    if not ALL and (first if REVERSE else last):
        return
    d = tl.arange(0, BY)
    e = iz * BZ + tl.arange(0, BZ)
    t = tl.arange(0, C)
    y_ = head(Y, b, start, h, T, HY, H, DY)
    z_ = head(Z, b, start, h, T, HZ, H, DZ)
    g_ = head(G, b, start, h, T, H, H, 1)
    S = tl.zeros([BY, BZ], tl.float32)
    total = 0.0
    n = (end - start + C - 1) // C
    for i in range(n):
        c = ((n - 1 - i) if REVERSE else i) * C
        r = c + t
        left = end - start
        y = tile(y_ + c * (HY * DY), t, left - c, d, HY * DY, DY)
        z = tile(z_ + c * (HZ * DZ), t, left - c, e, HZ * DZ, DZ)
        if GATED:
            G_ = tl.load(g_ + tl.minimum(r, left - 1) * H)
            GC = tl.load(g_ + (tl.minimum(c + C, left) - 1) * H)
            z = (z.to(tl.float32) * tl.exp(G_ if REVERSE else GC - G_)[:, None]).to(z.dtype)
            S *= tl.exp(GC)
            total += GC
        S = tl.dot(tl.trans(y), z, S, input_precision=PREC)
    row = (b.to(tl.int64) * NS + s) * H + h
    put(b_ + row * (DY * DZ), S * scale, d, DY, e, DZ, DZ)
    if GATED and iz == 0:
        tl.store(log_a + row, total)


@triton.jit(do_not_specialize=SIZES)
def attend_kernel(
    X, Y, Z, G, entering, O, leaving, W, DOT, ADJ, EDGE, table, T, NS, N, LENGTH, scale, H: tl.constexpr, HX: tl.constexpr,
    HY: tl.constexpr, HZ: tl.constexpr, HW: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr, BX: tl.constexpr,
    BZ: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr, HAS_STATE: tl.constexpr, LEAVE: tl.constexpr, DOTS: tl.constexpr, EDGES: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """The operation above for one segment and BZ columns of z.

    TRANSPOSED: states lie in memory as [DZ, DX]. LEAVE stores the scan's last state. DOTS: DOT = Σ out·W by token.
    EDGES: EDGE = <state after the segment, ADJ>.
    """
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    iz = tl.program_id(0) % NZ
    s = tl.program_id(0) // NZ
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, _, first, last = span(table, s, T, LENGTH, C, VARLEN)
    if end <= start:
        return
    d = tl.arange(0, BX)
    e = iz * BZ + tl.arange(0, BZ)
    t = tl.arange(0, C)
    x_ = head(X, b, start, h, T, HX, H, DX)
    y_ = head(Y, b, start, h, T, HY, H, DX)
    z_ = head(Z, b, start, h, T, HZ, H, DZ)
    o_ = head(O, b, start, h, T, H, H, DZ)
    g_ = head(G, b, start, h, T, H, H, 1)
    row = (b.to(tl.int64) * NS + s) * H + h
    inside = (d < DX)[:, None] & (e < DZ)[None, :]
    at = d[:, None] + e[None, :] * DX if TRANSPOSED else d[:, None] * DZ + e[None, :]
    S = tl.zeros([BX, BZ], tl.float32)
    if HAS_STATE:
        S = tl.load(entering + row * (DX * DZ) + at, inside, other=0.0)
    n = (end - start + C - 1) // C
    left = end - start
    causal = t[:, None] <= t[None, :] if REVERSE else t[:, None] >= t[None, :]
    for i in range(n):
        c = ((n - 1 - i) if REVERSE else i) * C
        x = tile(x_ + c * (HX * DX), t, left - c, d, HX * DX, DX)
        y = tile(y_ + c * (HY * DX), t, left - c, d, HY * DX, DX)
        z = tile(z_ + c * (HZ * DZ), t, left - c, e, HZ * DZ, DZ)
        A = tl.dot(x, tl.trans(y), input_precision=PREC)
        o = tl.dot(x, S.to(x.dtype), input_precision=PREC)
        if GATED:
            G_ = tl.load(g_ + tl.minimum(c + t, left - 1) * H)
            GC = tl.load(g_ + (tl.minimum(c + C, left) - 1) * H)
            gap = G_[None, :] - G_[:, None] if REVERSE else G_[:, None] - G_[None, :]
            A = tl.where(causal, A * tl.exp(tl.where(causal, gap, 0.0)), 0.0) * scale
            o *= (tl.exp(GC - G_) if REVERSE else tl.exp(G_) * scale)[:, None]
            w = tl.exp(G_) * scale if REVERSE else tl.exp(GC - G_)
            S *= tl.exp(GC)
            zw = (z.to(tl.float32) * w[:, None]).to(z.dtype)
        else:
            A = tl.where(causal, A, 0.0) * scale
            zw = z
            if REVERSE:
                zw = (z.to(tl.float32) * scale).to(z.dtype)
            else:
                o *= scale
        o = tl.dot(A.to(z.dtype), z, o, input_precision=PREC)
        S = tl.dot(tl.trans(y), zw, S, input_precision=PREC)
        put(o_ + c * (H * DZ), o, t, left - c, e, H * DZ, DZ)
        if DOTS:
            w_ = head(W, b, start, h, T, HW, H, DZ)
            w = tile(w_ + c * (HW * DZ), t, left - c, e, HW * DZ, DZ)
            dots = DOT + ((iz * (tl.num_programs(1) // H) + b).to(tl.int64) * T + start + c + t) * H + h
            tl.store(dots, tl.sum(o * w.to(tl.float32), 1), t < left - c)
    if EDGES:
        adj = tl.load(ADJ + row * (DX * DZ) + at, inside, other=0.0)
        edge = ((iz * (tl.num_programs(1) // H) + b).to(tl.int64) * NS + s) * H + h
        tl.store(EDGE + edge, tl.sum(S * adj))
    if LEAVE and (first if REVERSE else last):
        own = ((b.to(tl.int64) * N + piece) * H + h) * (DX * DZ)
        tl.store(leaving + own + at, S, inside)
