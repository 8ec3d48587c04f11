"""Additive writes under a scalar decay or none: S_t = e^{g_t} S_{t−1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t.

The output and all three gradients are one operation with the roles exchanged (x reads, y writes, z is
what is written; F holds the factors of the running log-decay of a chunk, S the state between chunks):

    forward   out_i = c_r e^{G_i} Sᵀx_i + c Σ_{j≤i} e^{G_i−G_j} (x_i·y_j) z_j     o: (q, k, v)    dq: (do, v, k)
    reverse   out_i = e^{G_C−G_i} Sᵀx_i + c Σ_{j≥i} e^{G_j−G_i} (x_i·y_j) z_j     dv: (k, q, do)  dk: (v, do, q)

dq reads the forward state and dk the adjoint state transposed. A span carries its state in registers, so no state
between chunks need reach memory (GLA, Yang et al. 2024, arXiv:2312.06635, materialises every chunk's or recomputes
them; the linear-attention form of the gradients is theirs). Where a log-decay's gradient is wanted the passes of o and
dv leave them for `chunk_gradients` (KEEP); where that cannot be, the passes of dq and dk sum q·dq and k·dk = v·dv by
token on their way (DOTS), for `gate_gradient`.

What a chunk waits for decides its time, not its arithmetic: so products of 64 rows do not feed each other as
accumulators (with 8 warps each half of the warps would compute all of it), and what the next chunk needs of the
factors is loaded a chunk ahead. BULK: x, y, z and out are tensor descriptors (see `operands`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.scalar_decay.operands import (
    Gates,
    columns,
    constant,
    described,
    rows,
    shared_constants,
    state_tiles,
    take,
    tiles,
)
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import ATTEND, ATTEND_GATED, ATTEND_KEEP, ATTEND_SUMS, Tiling
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=SIZES)
def attend_kernel(
    X, Y, Z, F, SKIPPED, entering, O, leaving, states, W, sums, DOT, STATE_DOT, before, ends, EDGE, table, T, NS, NC, N,
    LENGTH, scale, H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HZ: tl.constexpr, DX: tl.constexpr,
    DZ: tl.constexpr, BX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr,
    STRONG: tl.constexpr, SKIP: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_STATE: tl.constexpr,
    LEAVE: tl.constexpr, KEEP: tl.constexpr, SUMS: tl.constexpr, DOTS: tl.constexpr, BULK: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """The operation above for one span and BZ columns of z; states lie in memory as [DX, DZ], or TRANSPOSED.

    LEAVE stores the scan's last state, KEEP that before each chunk, `states` [B, NC, H, DX, DZ]. STATIC: every token of
    a head has the same log-decay, F [H] (of any dtype). STRONG: in o's pass, by token, z comes times β; SKIP: and times
    SKIPPED [H] is added to o. W has z's
    heads. SUMS (without a decay): `sums` [B, NS, H, DZ, DX] = scale Σ w xᵀ of each span, zeros for a piece's first: in
    dq's pass, with q for w, what spans add to the state's gradient; out is no descriptor then, since its staging would
    not fit beside three chunks. DOTS (with GATED): DOT [NZ, B, H, T] = out·W by token; forward also STATE_DOT, the part
    of it that comes in with the chunk's state; reverse with a state also EDGE [NZ, B, H, NS] = <that state, the
    forward's after the span>, the latter from `before`, of the spans, or `ends`, of
    the pieces.
    """
    NZ: tl.constexpr = (DZ + BZ - 1) // BZ
    iz = tl.program_id(0) % NZ
    s = tl.program_id(0) // NZ
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    d = tl.arange(0, BX)
    e = iz * BZ + tl.arange(0, BZ)
    t = tl.arange(0, C)
    x_, rx, cx = rows(X, b, start, h, T, HX, H, DX, BULK)
    y_, ry, cy = rows(Y, b, start, h, T, HY, H, DX, BULK)
    z_, rz, cz = rows(Z, b, start, h, T, HZ, H, DZ, BULK)
    o_, ro, co = rows(O, b, start, h, T, H, H, DZ, BULK and not SUMS)
    if DOTS:
        w_ = head(W, b, start, h, T, HZ, H, DZ)
    if SUMS:
        w_, rw, cw = rows(W, b, start, h, T, HZ, H, DZ, BULK)
        ahead = tl.where(first, 0, 1)  # nobody wants the first span's sum: it reads one chunk again and again
        B = tl.zeros([BZ, BX], tl.float32)
    f_ = F + ((b.to(tl.int64) * NC + chunk) * H + h) * (4 * C)
    row = (b.to(tl.int64) * NS + s) * H + h
    own = ((b.to(tl.int64) * N + piece) * H + h) * (DX * DZ)
    part = (iz * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    inside = (d < DX)[:, None] & (e < DZ)[None, :]
    at = e[None, :] * DX + d[:, None] if TRANSPOSED else d[:, None] * DZ + e[None, :]
    S = tl.zeros([BX, BZ], tl.float32)
    if HAS_STATE:
        S = tl.load(entering + row * (DX * DZ) + at, inside, other=0.0)
        if DOTS and REVERSE:
            after = tl.load(ends + own + at, inside & last, other=0.0)
            after += tl.load(before + (row + H) * (DX * DZ) + at, inside & (last == 0), other=0.0)
            tl.store(EDGE + part * NS + s, tl.sum(tl.sum(S * after, 1), 0))
    n = (left + C - 1) // C
    sees = t[:, None] <= t[None, :] if REVERSE else t[:, None] >= t[None, :]  # [i, j]
    one = tl.where(left > 0, 1.0, 0.0)  # a factor the compiler does not know, or it would chain the two products
    gc = 0.0
    if SKIP:
        skip = tl.load(SKIPPED + h).to(tl.float32) / scale
    reach = tl.zeros([C], tl.float32)  # what is left of the state's part at each token
    if STATIC:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
        gap = (t[None, :] - t[:, None] if REVERSE else t[:, None] - t[None, :]).to(tl.float32) * rate
        decay = tl.exp2(tl.where(sees, gap, float("-inf"))) * scale
    elif GATED:
        f = f_ + (n - 1 if REVERSE else 0) * (H * 4 * C)
        gc = tl.load(f + C - 1)
        reach = tl.load(f + (2 * C if REVERSE else C) + t)
    for m in range(n):
        i = n - 1 - m if REVERSE else m
        c = i * C
        x = take(X, x_, rx, cx, c, t, left, d, 0, HX * DX, DX, BULK)
        y = take(Y, y_, ry, cy, c, t, left, d, 0, HY * DX, DX, BULK)
        z = take(Z, z_, rz, cz, c, t, left, e, iz * BZ, HZ * DZ, DZ, BULK)
        if DOTS:
            w = tile(w_ + c * (HZ * DZ), t, left - c, e, HZ * DZ, DZ)
        if SUMS:
            w = take(W, w_, rw, cw, c * ahead, t, left, e, iz * BZ, HZ * DZ, DZ, BULK)
            B = tl.dot(tl.trans(w), x, B, input_precision=PREC)
        A = tl.dot(x, tl.trans(y), input_precision=PREC)
        yw = tl.trans(y)
        reach_next = reach
        gc_next = gc
        if STATIC:
            level, rest, gc = constant(rate, scale, tl.minimum(left - c, C), t)
            reach = rest if REVERSE else level
            keep = level if REVERSE else rest
            A *= decay
        elif GATED:
            f = f_ + (tl.maximum(i - 1, 0) if REVERSE else tl.minimum(i + 1, n - 1)) * (H * 4 * C)
            gc_next = tl.load(f + C - 1)
            reach_next = tl.load(f + (2 * C if REVERSE else C) + t)
            f = f_ + i * (H * 4 * C)
            keep = tl.load(f + (C if REVERSE else 2 * C) + t)
            g = tl.load(f + t)
            gap = g[None, :] - g[:, None] if REVERSE else g[:, None] - g[None, :]
            A *= tl.exp2(tl.where(sees, gap, float("-inf")))
            if STRONG:
                A *= tl.load(f + 3 * C + t)[None, :]
            if SKIP:
                A += tl.where(t[:, None] == t[None, :], skip, 0.0)
        if GATED:
            yw = (yw.to(tl.float32) * keep[None, :]).to(x.dtype)
        else:
            A = tl.where(sees, A, 0.0)
            if REVERSE:
                yw = (yw.to(tl.float32) * scale).to(x.dtype)
        held = S.to(x.dtype)
        if KEEP:
            place = (b * NC + chunk + i) * H + h
            if BULK:
                states.store([place * DX, iz * BZ], held)
            else:
                tl.store(states + place.to(tl.int64) * (DX * DZ) + at, held, inside)
        o = tl.dot(x, held, input_precision=PREC)
        if GATED:
            o *= reach[:, None]
            S *= tl.exp2(gc)
        else:
            o *= one if REVERSE else scale
        inner = tl.dot(A.to(x.dtype), z, input_precision=PREC) * (one if STATIC else scale)
        S = tl.dot(yw, z, S, input_precision=PREC)
        if DOTS:
            token = part * T + start + c + t
            wide = w.to(tl.float32)
            if REVERSE:
                o += inner
                dot = tl.sum(o * wide, 1)
            else:
                came = o * wide
                o += inner
                dot, came = tl.reduce((o * wide, came), 1, _both)
                tl.store(STATE_DOT + token, came, t < left - c)
            tl.store(DOT + token, dot, t < left - c)
        else:
            o += inner
        if BULK and not SUMS:
            O.store([ro + c, co + iz * BZ], o.to(x.dtype))
        else:
            put(o_ + c * (H * DZ), o, t, left - c, e, H * DZ, DZ)
        gc = gc_next
        reach = reach_next
    if LEAVE and (first if REVERSE else last):
        tl.store(leaving + own + at, S, inside)
    if SUMS:
        place = sums + row * (DX * DZ) + e[:, None] * DX + d[None, :]
        tl.store(place, B * (scale * ahead), (e < DZ)[:, None] & (d < DX)[None, :])


class Roles(NamedTuple):
    """Who reads, writes and is written in one of the operation's four uses, and how it runs (see above)."""

    x: Tensor
    y: Tensor
    z: Tensor
    reverse: bool = False
    transposed: bool = False


class SpanSums(NamedTuple):
    """In dq's pass, what spans add to the state's gradient: `sums` [B, NS, H, DZ, DX] from q, in w's place."""

    w: Tensor
    sums: Tensor


class TokenDots(NamedTuple):
    """out·w by token [NZ, B, H, T]; forward also the part of it that comes in with a chunk's state; reverse also `edge`
    [NZ, B, H, NS], <the state that enters a span, the forward's after it>, the latter from `before`, of the spans, or
    `ends`, of the pieces."""

    w: Tensor
    out: Tensor
    of_state: Tensor | None = None
    before: Tensor | None = None
    ends: Tensor | None = None
    edge: Tensor | None = None


class Left(NamedTuple):
    """Where states go: the last of each piece, and those before the chunks."""

    leaving: Tensor | None = None
    states: Tensor | None = None


NOWHERE = Left()


def attend(
    plan: SpanPlan, gates: Gates, roles: Roles, out: Tensor, entering: Tensor | None, left: Left = NOWHERE,
    extra: SpanSums | TokenDots | None = None,
) -> None:  # fmt: skip
    """One of the four uses of `attend_kernel` on all spans, given the states that enter them (None: zero)."""
    (x, y, z, reverse, transposed), spans, T = roles, plan.spans, plan.sizes.T
    if not reverse and not transposed and gates.present and not gates.constant and by_gluon(plan):
        from ring_la.kernels.scalar_decay.attend_hopper import outputs

        return outputs(plan, gates, (x, y, z), out, entering, left.leaving, left.states)
    dx, dz, dots = x.shape[3], z.shape[3], extra if isinstance(extra, TokenDots) else None
    how = _tiling(plan, gates, roles, left, extra)
    block, wide = min(how.block, columns(dz)), columns(dx)
    summed = isinstance(extra, SpanSums)
    sums, w = (extra.sums, tiles(plan, extra.w, block)) if summed else (None, None if dots is None else dots.w)  # type: ignore[union-attr]
    launch(
        attend_kernel, (cdiv(dz, block) * spans.count, plan.rows),
        *filled(
            tiles(plan, x, wide), tiles(plan, y, wide), tiles(plan, z, block), gates.read, gates.skip, entering,
            tiles(plan, out, block, not summed), left.leaving, state_tiles(plan, left.states, wide, block), w, sums,
            *(dots[1:] if dots is not None else (None,) * 5),
        ),
        spans.table, T, spans.count, plan.chunk_count, spans.pieces, spans.length, plan.scale, HX=x.shape[2],
        HY=y.shape[2], HZ=z.shape[2], DX=dx, DZ=dz, BX=wide, BZ=block, GATED=gates.present, STATIC=gates.constant,
        STRONG=gates.strong, SKIP=gates.skip is not None, REVERSE=reverse, TRANSPOSED=transposed,
        HAS_STATE=entering is not None, LEAVE=left.leaving is not None, KEEP=left.states is not None, SUMS=summed,
        DOTS=dots is not None, **shared_constants(plan), **how.options,
    )  # fmt: skip


def by_gluon(plan: SpanPlan) -> bool:
    """Whether o's pass under a decay by token is the one for Hopper."""
    return plan.gluon and (plan.sizes.K, plan.sizes.V) == (128, 64)


def _tiling(plan: SpanPlan, gates: Gates, roles: Roles, left: Left, extra: SpanSums | TokenDots | None) -> Tiling:
    gated = gates.present and not gates.constant
    if isinstance(extra, SpanSums):
        return plan.pick(ATTEND_SUMS)
    if gated and described(plan) and left.states is not None and roles.x.shape[3] == roles.z.shape[3] == 128:
        return ATTEND_KEEP
    return plan.pick(ATTEND_GATED if gated else ATTEND)


def gated_parts(plan: SpanPlan, D: int) -> int:
    """Programs that share the columns of one head under a decay by token."""
    return cdiv(D, min(plan.pick(ATTEND_GATED).block, columns(D)))
