"""The short convolution block by block, each behind the W − 1 rows before it: ``z_t = Σ_j w_j x_{t−W+1+j} + bias``.

A program is one warp that walks over a block with its channels' last W − 1 rows in registers, as those of
`fused.short_conv_device` do. A row's gradient has two terms, which are rounded before they are added: its own block's,
and the next one's, in whose lead it is. The next one's is made again from that block's first W − 1 rows where this
rank has them; else it comes from the rank that has, in the same bits: nothing is contracted but what says so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.fused.short_conv_device import rows, shifted, taps


@triton.jit
def place(table, n):
    """Of a block: start, stop, the start and the end of its piece, and the piece's number."""
    at = table + n * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def before(x, lead, start, first, piece, d, inside, D: tl.constexpr, W: tl.constexpr):
    """Rows −1 to −W + 1 of a block, fp32: tokens, or the lead's of the piece that it is the `first` one of."""
    out = ()
    for m in tl.static_range(1, W):
        own = tl.load(x + (start - m).to(tl.int64) * D + d, inside & (first == 0), other=0.0)
        led = tl.load(lead + (piece.to(tl.int64) * (W - 1) + (W - 1 - m)) * D + d, inside & first, other=0.0)
        out += (own.to(tl.float32) + led.to(tl.float32),)
    return out


@triton.jit
def reading(ys, w, offset, W: tl.constexpr):
    """z of a row and the W − 1 before it."""
    z = offset
    for m in tl.static_range(W):
        z = tl.fma(w[W - 1 - m], ys[m], z)
    return z


@triton.jit
def activated_slope(dz, ys, w, offset, W: tl.constexpr, SILU: tl.constexpr):
    """dz of a row, given the gradient of its o."""
    if SILU:
        z = reading(ys, w, offset, W)
        s = tl.sigmoid(z)
        dz *= s * tl.fma(z, 1 - s, 1.0)
    return dz


@triton.jit
def conv_forward_kernel(
    x, lead, weight, bias, table, o, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (D + BD - 1) // BD
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    start, stop, begin, _, piece = place(table, tl.program_id(0) // columns)
    w = taps(weight, d, inside, W)
    offset = tl.zeros([BD], tl.float32)
    if BIAS:
        offset += tl.load(bias + d, inside, other=0.0).to(tl.float32)
    earlier = before(x, lead, start, start == begin, piece, d, inside, D, W)
    for n in range(tl.cdiv(stop - start, STEP)):
        new = rows(x, start + n * STEP, stop, D, d, inside, STEP)
        for i in tl.static_range(STEP):
            t = start + n * STEP + i
            y = new[i].to(tl.float32)
            z = reading(shifted(y, earlier, W), w, offset, W)
            if SILU:
                z = z * tl.sigmoid(z)
            tl.store(o + t.to(tl.int64) * D + d, z.to(o.dtype.element_ty), inside & (t < stop))
            earlier = shifted(y, earlier, W - 1)


@triton.jit
def put_gradient(
    g, led, dx, dlead, dends, t, start, stop, end, first, piece, d, inside, D: tl.constexpr, W: tl.constexpr,
    LED: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The gradient of the row W − 1 before `t`, of its block or (`first`) of the piece's lead: g, and apart from it
    what the next block gives and, of a piece's last rows, what the final state does."""
    late = t - (W - 1)
    g = g.to(dx.dtype.element_ty)
    own = inside & (late >= start) & (late < stop)
    if LED or ENDS:
        more = led.to(dx.dtype.element_ty).to(tl.float32)
        if ENDS:
            r = W - 1 - (end - late)
            at = (piece.to(tl.int64) * (W - 1) + r) * D + d
            more += tl.load(dends + at, own & (r >= 0), other=0.0).to(tl.float32)
        both = g.to(tl.float32) + more.to(dx.dtype.element_ty).to(tl.float32)
        g = tl.where(own, both.to(dx.dtype.element_ty), g)
    tl.store(dx + late.to(tl.int64) * D + d, g, own)
    at = (piece.to(tl.int64) * (W - 1) + (t - start)) * D + d
    tl.store(dlead + at, g, inside & first & (late < start))


@triton.jit
def conv_back_kernel(
    x, lead, weight, bias, table, do, dends, dx, dlead, sums, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
    STEP: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """dx, the gradient of the pieces' leads, and what each block gives to the weight and the bias ``[W + 1, D]``."""
    columns: tl.constexpr = (D + BD - 1) // BD
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    start, stop, begin, end, piece = place(table, tl.program_id(0) // columns)
    first = start == begin
    w = taps(weight, d, inside, W)
    zero = tl.zeros([BD], tl.float32)
    offset, dbias = zero, zero
    if BIAS:
        offset += tl.load(bias + d, inside, other=0.0).to(tl.float32)
    earlier = before(x, lead, start, first, piece, d, inside, D, W)
    dzs = ()
    dw = (zero,)
    for _ in tl.static_range(1, W):
        dzs += (zero,)
        dw += (zero,)
    steps = tl.cdiv(stop - start, STEP)
    for n in range(steps):
        new = rows(x, start + n * STEP, stop, D, d, inside, STEP)
        given = rows(do, start + n * STEP, stop, D, d, inside, STEP)
        for i in tl.static_range(STEP):
            ys = shifted(new[i].to(tl.float32), earlier, W)
            dz = activated_slope(given[i].to(tl.float32), ys, w, offset, W, SILU)
            more = ()
            for j in tl.static_range(W):
                more += (tl.fma(dz, ys[W - 1 - j], dw[j]),)
            dw = more
            dbias += dz
            g = w[0] * dz
            for k in tl.static_range(1, W):
                g = tl.fma(w[k], dzs[k - 1], g)
            t = start + n * STEP + i
            put_gradient(g, zero, dx, dlead, dends, t, start, stop, end, first, piece, d, inside, D, W, False, ENDS)
            earlier = shifted(ys[0], earlier, W - 1)
            dzs = shifted(dz, dzs, W - 1)
    for j in tl.static_range(W):
        tl.store(sums + ((tl.program_id(0) // columns).to(tl.int64) * (W + 1) + j) * D + d, dw[j], inside)
    tl.store(sums + ((tl.program_id(0) // columns).to(tl.int64) * (W + 1) + W) * D + d, dbias, inside)
    beyond = start + steps * STEP  # of a full block its end: the next one may follow
    new = rows(x, beyond, end, D, d, inside, W - 1)
    given = rows(do, beyond, end, D, d, inside, W - 1)
    nexts = ()
    for i in tl.static_range(W - 1):
        ys = shifted(new[i].to(tl.float32), earlier, W)
        nexts = shifted(activated_slope(given[i].to(tl.float32), ys, w, offset, W, SILU), nexts, i + 1)
        led = w[0] * nexts[0]
        for k in tl.static_range(1, i + 1):
            led = tl.fma(w[k], nexts[k], led)
        g = zero
        for k in tl.static_range(i + 1, W):
            g = tl.fma(w[k], dzs[k - i - 1], g)
        put_gradient(g, led, dx, dlead, dends, beyond + i, start, stop, end, first, piece, d, inside, D, W, True, ENDS)
        earlier = shifted(ys[0], earlier, W - 1)
