"""The short causal convolution, its activation, and their gradients, one pass over the tokens each.

Behind its lead a piece of n tokens is a sequence y of W−1+n rows, of which token u (counted in its piece) is row
u + W − 1. With weight w [D, W]:

    z_u = Σ_j w_j y_{u+j} + bias,   o = z or silu(z),   ends_r = y_{n+r}
    dy_i = Σ_j w_j dz_{i−j} (where 0 ≤ i−j < n) + dends_{i−n} (where i ≥ n),   dw_j = Σ_u dz_u y_{u+j}

A program is one warp that walks over a run of tokens with its channels' last W − 1 rows in registers: every row is read
once, and sums over tokens are sums of a thread. The backward computes z again and is done in the same walk. A run that
meets neither a piece's first tokens nor its last takes a walk that does not ask where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("T", "N", "STEPS", "RUN", "sb", "st", "lb", "ln", "lr", "lc")


@triton.jit
def place(cu, t, T, N, STEPS, PACKED: tl.constexpr):
    """(piece, its start, its end) of token t."""
    piece = t * 0
    start = piece
    end = piece + T
    if PACKED:
        beyond = piece + N
        for _ in range(STEPS):
            middle = (piece + beyond) // 2
            after = tl.load(cu + middle).to(tl.int32) <= t
            piece = tl.where(after, middle, piece)
            beyond = tl.where(after, beyond, middle)
        start = tl.load(cu + piece).to(tl.int32)
        end = tl.load(cu + piece + 1).to(tl.int32)
    return piece, start, end


@triton.jit
def onward(cu, t, piece, start, end, N, PACKED: tl.constexpr):
    """(piece, its start, its end) of token t, from those of an earlier one; the last piece's beyond it."""
    if PACKED:
        while (t >= end) & (piece < N - 1):
            piece += 1
            start = end
            end = tl.load(cu + piece + 1).to(tl.int32)
    return piece, start, end


@triton.jit
def rows(x, t, T, stride, d, inside, COUNT: tl.constexpr):
    """Rows t, t + 1, … of x, zero from T on."""
    out = ()
    for i in tl.static_range(COUNT):
        out += (tl.load(x + (t + i).to(tl.int64) * stride + d, inside & (t + i < T), other=0.0),)
    return out


@triton.jit
def taps(weight, d, inside, W: tl.constexpr):
    """The weight's columns, fp32."""
    out = ()
    for j in tl.static_range(W):
        out += (tl.load(weight + d * W + j, inside, other=0.0).to(tl.float32),)
    return out


@triton.jit
def before(x, t, start, stride, d, inside, W: tl.constexpr):
    """Rows t − 1 to t − W + 1 of x, fp32, zero before `start`."""
    out = ()
    for m in tl.static_range(1, W):
        y = tl.load(x + (t - m).to(tl.int64) * stride + d, inside & (t - m >= start), other=0.0)
        out += (y.to(tl.float32),)
    return out


@triton.jit
def window(
    y, earlier, lead, u, piece, d, inside, ln, lr, lc, W: tl.constexpr, LEAD: tl.constexpr, PACKED: tl.constexpr
):
    """Row u of a piece and the W − 1 before it, given those before in the sequence: tokens, the lead's, or zeros."""
    out = (y,)
    for m in tl.static_range(1, W):
        y = earlier[m - 1]
        if PACKED:
            y = tl.where(u >= m, y, 0.0)
        if LEAD:
            at = piece.to(tl.int64) * ln + (W - 1 + u - m) * lr + d * lc
            y += tl.load(lead + at, inside & (u < m), other=0.0).to(tl.float32)
        out += (y,)
    return out


@triton.jit
def reading(ys, w, offset, W: tl.constexpr):
    """z of a window."""
    z = offset
    for m in tl.static_range(W):
        z += w[W - 1 - m] * ys[m]
    return z


@triton.jit
def shifted(new, old, COUNT: tl.constexpr):
    """The newest COUNT."""
    out = ()
    if COUNT > 0:
        out += (new,)
    for m in tl.static_range(COUNT - 1):
        out += (old[m],)
    return out


@triton.jit
def walk(
    x, w, offset, lead, cu, o, begin, stop, piece, start, end, N, st, d, inside, ln, lr, lc, D: tl.constexpr,
    W: tl.constexpr, STEP: tl.constexpr, SILU: tl.constexpr, LEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o of tokens begin to stop, one after the other."""
    earlier = before(x, begin, start, st, d, inside, W)
    for n in range(tl.cdiv(stop - begin, STEP)):
        first = begin + n * STEP
        new = rows(x, first, stop, st, d, inside, STEP)
        for i in tl.static_range(STEP):
            t = first + i
            piece, start, end = onward(cu, t, piece, start, end, N, PACKED)
            y = new[i].to(tl.float32)
            ys = window(y, earlier, lead, t - start, piece, d, inside, ln, lr, lc, W, LEAD, PACKED)
            z = reading(ys, w, offset, W)
            if SILU:
                z = z * tl.sigmoid(z)
            tl.store(o + t.to(tl.int64) * D + d, z.to(o.dtype.element_ty), inside & (t < stop))
            earlier = shifted(y, earlier, W - 1)


@triton.jit(do_not_specialize=SIZES)
def conv_kernel(
    x, weight, bias, lead, cu, o, T, N, STEPS, RUN, sb, st, lb, ln, lr, lc, D: tl.constexpr, W: tl.constexpr,
    BD: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    LEAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o of RUN tokens, one after the other: the rows a token reads stay in registers."""
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    begin = tl.program_id(0) // columns * RUN
    stop = tl.minimum(begin + RUN, T)
    piece, start, end = place(cu, begin, T, N, STEPS, PACKED)
    st *= UNIT
    x += b * sb * UNIT
    o += b * T * D
    lead += b * lb
    w = taps(weight, d, inside, W)
    offset = tl.zeros([BD], tl.float32)
    if BIAS:
        offset += tl.load(bias + d, inside, other=0.0).to(tl.float32)
    far = LEAD or PACKED
    if far:  # from borders, as most runs are: half the work
        far = (begin >= start + W - 1) & (stop <= end)
    if far:
        walk(
            x, w, offset, lead, cu, o, begin, stop, piece, start, end, N, st, d, inside, ln, lr, lc, D, W, STEP, SILU,
            False, False,
        )  # fmt: skip
    else:
        walk(
            x, w, offset, lead, cu, o, begin, stop, piece, start, end, N, st, d, inside, ln, lr, lc, D, W, STEP, SILU,
            LEAD, PACKED,
        )  # fmt: skip


@triton.jit
def walk_back(
    x, w, offset, lead, cu, do, dends, dx, heads, sums, begin, stop, T, piece, start, end, b, N, st, d, inside, ln, lr,
    lc, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, SILU: tl.constexpr,
    LEAD: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx of tokens begin to stop and their sums for weight and bias."""
    behind, since, last = piece, start, end
    earlier = before(x, begin, start, st, d, inside, W)
    zero = tl.zeros([BD], tl.float32)
    dzs = ()
    dw = (zero,)
    for _ in tl.static_range(1, W):
        dzs += (zero,)
        dw += (zero,)
    dbias = zero
    for n in range(tl.cdiv(stop + W - 1 - begin, STEP)):
        first = begin + n * STEP
        new = rows(x, first, T, st, d, inside, STEP)
        given = rows(do, first, T, D, d, inside, STEP)
        for i in tl.static_range(STEP):
            t = first + i
            piece, start, end = onward(cu, t, piece, start, end, N, PACKED)
            u = t - start
            y = new[i].to(tl.float32)
            dz = given[i].to(tl.float32)
            ys = window(y, earlier, lead, u, piece, d, inside, ln, lr, lc, W, LEAD, PACKED)
            if SILU:
                z = reading(ys, w, offset, W)
                s = tl.sigmoid(z)
                dz *= s * (1 + z * (1 - s))
            own = tl.where(t < stop, dz, 0.0)
            more = ()
            for j in tl.static_range(W):
                more += (dw[j] + own * ys[W - 1 - j],)
            dw = more
            dbias += own
            if LEAD:
                at = ((b * N + piece) * (W - 1) + u) * D + d
                tl.store(heads + at, dz, inside & (u < W - 1) & (t < stop))
            late = t - (W - 1)
            behind, since, last = onward(cu, late, behind, since, last, N, PACKED)
            g = w[0] * dz
            if PACKED:
                g = tl.where(t < last, g, 0.0)
            for k in tl.static_range(1, W):
                more_g = w[k] * dzs[k - 1]
                if PACKED:
                    more_g = tl.where(t - k < last, more_g, 0.0)
                g += more_g
            out = (late >= begin) & (late < stop)
            if ENDS:
                r = W - 1 - (last - late)
                at = ((b * N + behind) * (W - 1) + r) * D + d
                g += tl.load(dends + at, inside & (r >= 0) & out, other=0.0).to(tl.float32)
            tl.store(dx + late.to(tl.int64) * D + d, g.to(dx.dtype.element_ty), inside & out)
            earlier = shifted(y, earlier, W - 1)
            dzs = shifted(dz, dzs, W - 1)
    for j in tl.static_range(W):
        tl.store(sums + d * W + j, dw[j], inside)
    tl.store(sums + W * D + d, dbias, inside)


@triton.jit(do_not_specialize=SIZES)
def conv_backward_kernel(
    x, weight, bias, lead, cu, do, dends, dx, heads, sums, T, N, STEPS, RUN, sb, st, lb, ln, lr, lc, D: tl.constexpr,
    W: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    LEAD: tl.constexpr, ENDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dx of RUN tokens, their sums for weight ``[D, W]`` and bias ``[D]``, and dz of the pieces' first W − 1 tokens.

    A token's dx reads dz of the W − 1 after it, so the walk goes on for as many and is that much behind with dx.
    """
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    inside = d < D
    run = tl.program_id(0) // columns
    begin = run * RUN
    stop = tl.minimum(begin + RUN, T)
    piece, start, end = place(cu, begin, T, N, STEPS, PACKED)
    st *= UNIT
    x += b * sb * UNIT
    do += b * T * D
    dx += b * T * D
    lead += b * lb
    sums += (b * tl.num_programs(0) // columns + run) * ((W + 1) * D)
    w = taps(weight, d, inside, W)
    offset = tl.zeros([BD], tl.float32)
    if BIAS:
        offset += tl.load(bias + d, inside, other=0.0).to(tl.float32)
    far = LEAD or ENDS or PACKED
    if far:
        far = (begin >= start + W - 1) & (stop + W - 1 <= end)
    if far:
        walk_back(
            x, w, offset, lead, cu, do, dends, dx, heads, sums, begin, stop, T, piece, start, end, b, N, st, d, inside,
            ln, lr, lc, D, W, BD, STEP, SILU, False, False, False,
        )  # fmt: skip
    else:
        walk_back(
            x, w, offset, lead, cu, do, dends, dx, heads, sums, begin, stop, T, piece, start, end, b, N, st, d, inside,
            ln, lr, lc, D, W, BD, STEP, SILU, LEAD, ENDS, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def conv_edges_kernel(
    x, lead, dz, weight, dends, cu, out, T, N, sb, st, lb, ln, lr, lc, D: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr, BACK: tl.constexpr, LEAD: tl.constexpr,
    ENDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """W − 1 rows a piece, ``out [B, N, W−1, D]``: its last ones, or (BACK) the gradient of those before its first, from
    dz of its first ones, shaped like `out`."""
    columns: tl.constexpr = (D + BD - 1) // BD
    b = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0) // columns
    d = (tl.program_id(0) % columns * BD + tl.arange(0, BD))[None, :]
    r = tl.arange(0, WP)[:, None]
    inside = (r < W - 1) & (d < D)
    start = tl.load(cu + piece).to(tl.int32) if PACKED else 0
    end = tl.load(cu + piece + 1).to(tl.int32) if PACKED else T
    length = end - start
    acc = tl.zeros([WP, BD], tl.float32)
    if BACK:
        for j in tl.static_range(W):
            u = r - j
            w = tl.load(weight + d * W + j, d < D, other=0.0).to(tl.float32)
            at = ((b * N + piece) * (W - 1) + u) * D + d
            acc += w * tl.load(dz + at, inside & (u >= 0) & (u < length), other=0.0).to(tl.float32)
        if ENDS:
            at = ((b * N + piece) * (W - 1) + r - length) * D + d
            acc += tl.load(dends + at, inside & (r >= length), other=0.0).to(tl.float32)
    else:
        i = length + r
        own = inside & (i >= W - 1)
        at = (b * sb + (start + i - (W - 1)).to(tl.int64) * st) * UNIT + d
        acc += tl.load(x + at, own, other=0.0).to(tl.float32)
        if LEAD:
            at = b * lb + piece.to(tl.int64) * ln + i * lr + d * lc
            acc += tl.load(lead + at, inside & (i < W - 1), other=0.0).to(tl.float32)
    at = ((b * N + piece) * (W - 1) + r) * D + d
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=("RUNS",))
def conv_sums_kernel(
    sums, dweight, dbias, RUNS, D: tl.constexpr, W: tl.constexpr, BLK: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The runs' sums ``[RUNS, (W + 1) D]`` added up: the gradients of weight and bias."""
    size: tl.constexpr = (W + 1) * D
    i = tl.program_id(0) * BLK + tl.arange(0, BLK)
    r = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLK], tl.float32)
    for n in range(0, RUNS, ROWS):
        inside = (n + r < RUNS)[:, None] & (i < size)[None, :]
        acc += tl.load(sums + (n + r).to(tl.int64)[:, None] * size + i[None, :], inside, other=0.0)
    total = tl.sum(acc, 0)
    tl.store(dweight + i, total.to(dweight.dtype.element_ty), i < W * D)
    if BIAS:
        tl.store(dbias + i - W * D, total.to(dbias.dtype.element_ty), (i >= W * D) & (i < size))
