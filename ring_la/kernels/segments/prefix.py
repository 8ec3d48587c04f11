"""The scan over the segments of each piece: from every segment's own map to the state that enters it.

Forward  S ← A_s S + b_s over s = first … last; the adjoint runs last … first with A_sᵀ. `entering[s]` is the state
before segment s (in the direction of the scan; ENTER), `leaving[n]` the state after the last one of piece n. Without S0
the first transition is not read: the passes leave it out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.triton.tiles import SIZES


@triton.jit
def _runs(first, n, NS, VARLEN: tl.constexpr):
    if VARLEN:
        return tl.load(first + n * 2), tl.load(first + n * 2 + 1)
    return 0, NS


@triton.jit
def _block(A, k, c, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A[k, c], or A[c, k] as such."""
    at = c[None, :] * K + k[:, None] if TRANSPOSED else k[:, None] * K + c[None, :]
    return tl.load(A + at, (k < K)[:, None] & (c < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def prefix_kernel(
    b_, log_a, S0, entering, leaving, first, NS, N, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DECAY: tl.constexpr, HAS_S0: tl.constexpr, ENTER: tl.constexpr, REVERSE: tl.constexpr, BLK: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Transitions none (DECAY 0), scalar (1: log2 A [B, NS, H]) or diagonal (2: [B, NS, H, K]), state by state."""
    e = tl.program_id(0) * BLK + tl.arange(0, BLK)
    n = tl.program_id(1)
    bh = tl.program_id(2)
    b = (bh // H).to(tl.int64)
    h = bh % H
    live = e < K * V
    lo, count = _runs(first, n, NS, VARLEN)
    own = ((b * N + n) * H + h) * K * V + e
    S = tl.zeros([BLK], tl.float32)
    if HAS_S0:
        S = tl.load(S0 + own, live, other=0.0)
    for i in range(count):
        s = lo + (count - 1 - i if REVERSE else i)
        row = (b * NS + s) * H + h
        x = tl.load(b_ + row * K * V + e, live, other=0.0)
        if ENTER:
            tl.store(entering + row * K * V + e, S, live)
        if DECAY != 0 and (HAS_S0 or i > 0):
            if DECAY == 1:
                S = S * tl.exp2(tl.load(log_a + row))
            else:
                S = S * tl.exp2(tl.load(log_a + row * K + e // V, live, other=0.0))
        S += x
    tl.store(leaving + own, S, live)


@triton.jit
def _fold(
    b_, A_, S0, entering, leaving, lo, count, b, n, h, column, NS, N, H: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, HAS_S0: tl.constexpr, EYE: tl.constexpr,
    ENTER: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """BV columns of one piece's state [K, W] under dense transitions; EYE: of the product of the transitions."""
    k = tl.arange(0, BK)
    j = tl.arange(0, BJ)
    v = column * BV + tl.arange(0, BV)
    live = (k < K)[:, None] & (v < W)[None, :]
    at = k[:, None] * W + v[None, :]
    own = ((b * N + n) * H + h) * K * W + at
    row = (b * NS + lo + (tl.maximum(count - 1, 0) if REVERSE else 0)) * H + h
    if HAS_S0:
        S = tl.load(S0 + own, live, other=0.0)
    elif EYE:
        S = _block(A_ + row * K * K, k, v, K, REVERSE)
        if count == 0:
            S = (k[:, None] == v[None, :]).to(tl.float32)
    else:
        S = tl.load(b_ + row * K * W + at, live & (count > 0), other=0.0)
        if ENTER:
            tl.store(entering + row * K * W + at, tl.zeros([BK, BV], tl.float32), live & (count > 0))
    for i in range(0 if HAS_S0 else 1, count):
        row = (b * NS + lo + (count - 1 - i if REVERSE else i)) * H + h
        if ENTER or BJ < BK:
            tl.store(entering + row * K * W + at, S, live)
        if EYE:
            acc = tl.zeros([BK, BV], tl.float32)
        else:
            acc = tl.load(b_ + row * K * W + at, live, other=0.0)
        if BJ == BK:
            S = tl.dot(_block(A_ + row * K * K, k, k, K, REVERSE), S, acc, input_precision="tf32x3")
        else:
            tl.debug_barrier()
            for m in range(0, K, BJ):
                c = m + j
                some = (c < K)[:, None] & (v < W)[None, :]
                part = tl.load(entering + row * K * W + c[:, None] * W + v[None, :], some, other=0.0)
                acc = tl.dot(_block(A_ + row * K * K, k, c, K, REVERSE), part, acc, input_precision="tf32x3")
            S = acc
    tl.store(leaving + own, S, live)


@triton.jit(do_not_specialize=SIZES)
def prefix_dense_kernel(
    b_, A_, S0, entering, leaving, before, passed, first, NS, N, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr, HAS_S0: tl.constexpr, ENTER: tl.constexpr,
    STATES: tl.constexpr, MAPS: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Dense transitions A [B, NS, H, K, K]. Where A is too large for one tile (BJ < BK), its columns meet the state BJ
    at a time, from `entering`.

    STATES: the scan itself. MAPS: the product of each piece's transitions, by programs of their own, in `passed` [B, N,
    H, K, K]; `before` [B, NS, H, K, K] is what `entering` is to states.
    """
    NV: tl.constexpr = (V + BV - 1) // BV if STATES else 0
    column = tl.program_id(0)
    n = tl.program_id(1)
    b = (tl.program_id(2) // H).to(tl.int64)
    h = tl.program_id(2) % H
    lo, count = _runs(first, n, NS, VARLEN)
    if STATES:
        if column < NV:
            _fold(
                b_, A_, S0, entering, leaving, lo, count, b, n, h, column, NS, N, H, K, V, BK, BJ, BV, HAS_S0, False,
                ENTER, REVERSE,
            )  # fmt: skip
    if MAPS:
        if column >= NV:
            _fold(
                A_, A_, A_, before, passed, lo, count, b, n, h, column - NV, NS, N, H, K, K, BK, BJ, BV, False, True,
                ENTER, REVERSE,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def through_kernel(log_a, out, first, NS, N, WIDTH, BLK: tl.constexpr, VARLEN: tl.constexpr):
    """The product of each piece's transitions, scalar or diagonal: log2 A [B, NS, WIDTH] to A [B, N, WIDTH]."""
    e = tl.program_id(0) * BLK + tl.arange(0, BLK)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    lo, count = _runs(first, n, NS, VARLEN)
    total = tl.zeros([BLK], tl.float32)
    for i in range(count):
        total += tl.load(log_a + (b * NS + lo + i) * WIDTH + e, e < WIDTH, other=0.0)
    tl.store(out + (b * N + n) * WIDTH + e, tl.exp2(total), e < WIDTH)
