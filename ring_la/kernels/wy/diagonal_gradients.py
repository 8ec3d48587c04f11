"""A chunk's gradients from what the two passes left: the state before it, S, and the gradient of the one after, dS.

With dA = dO Uᵀ and dE = dR Uᵀ (t ≥ s and t > s), decays e^{G_t−G_s} inside the sums, and k's two roles apart (it is
read against the state, and written to it):

    dq_t      = scale · (e^{G_t} S dO_t + Σ_s dA_ts k_s)
    dk_t read =        e^{G_t} S dR_t + Σ_s dE_ts k_s                       (enters dk with −β_t)
    dk_s write = e^{G_C−G_s} dS U_s + Σ_t scale · dA_ts q_t − Σ_t β_t dE_ts k_t
    dβ_t = dR_t·v_t − k_t·(dk_t read),   dv_t = β_t dR_t
    dG_t = q_t·dq_t − β_t k_t·(dk_t read) − k_t·(dk_t write);   dg_t = <S', dS> + Σ_{s≥t} dG_s

S' the state after the chunk. What the pass leaves is dv = β dR, rounded once: E and the read part of dk come of it with
their β, and dβ is divided by it (`divisor`). Here a decay per key channel, where the same holds channel by channel and
the decayed sums go by `levels`; P = scale · dA and E = dE are found first. `delta_gradients` does it for a
scalar decay or none.
(The identities are the adjoint of the WY form; cf. arXiv:2412.06464, arXiv:2510.26692.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import GRADIENT_DIAGONAL
from ring_la.kernels.triton.gates import divisor, share
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.backward import value_gradient
from ring_la.kernels.wy.levels import gates_at, level_count, level_weights
from ring_la.kernels.wy.saved import ChunkAdjoints, ChunkProducts, ChunkStates


@triton.jit
def parted(x, dtype: tl.constexpr):
    """fp32 x in two parts of `dtype`."""
    part = x.to(dtype)
    return part, (x - part.to(tl.float32)).to(dtype)


@triton.jit
def times(a, rest, b, acc, REST: tl.constexpr, LEFT: tl.constexpr, PREC: tl.constexpr):
    """acc + a b for an fp32 b in a's dtype; REST: a + rest in place of a; LEFT: and what rounding b leaves."""
    part, left = parted(b, a.dtype)
    if a.dtype != tl.float32:
        if LEFT:
            acc = tl.dot(a, left, acc, input_precision=PREC)
        if REST:
            acc = tl.dot(rest, part, acc, input_precision=PREC)
    return tl.dot(a, part, acc, input_precision=PREC)


@triton.jit
def at_once(dq, dw, dread, x, y, z, of, p, p2, pt, pt2, g, gc, ref, DELTA: tl.constexpr, PREC: tl.constexpr):
    """A chunk under one reference: (dq, dw, dread, dG, Σ k·dw of what leaves it), given what the states contribute."""
    up = tl.exp2(g - ref[None, :])
    down = tl.exp2(ref[None, :] - g)
    from_start = tl.exp2(ref)[None, :]
    yw = y * down
    xw = x * up
    dq = times(p, p2, yw, dq * from_start, not DELTA, True, PREC)
    dG = xw * dq
    dw *= tl.exp2(gc - ref)[None, :]
    inside = tl.sum(yw * dw, 0)
    dw = times(pt, pt2, xw, dw, not DELTA, True, PREC)
    if DELTA:
        xw = -(z * up) * of
        dread = times(p2, p2, yw, dread * from_start, False, True, PREC)
        dG += xw * dread
        dread *= up
        dw = times(pt2, pt2, xw, dw, False, True, PREC)
    dG -= yw * dw
    return dq * up, dw * down, dread, dG, inside


@triton.jit
def at_level(dq, dw, dread, dG, x, y, z, of, p, p2, pt, pt2, up, down, DELTA: tl.constexpr, PREC: tl.constexpr):
    """(dq, dw, dread, dG) with the pairs of one level.

    Pairs cancel in dG: what they are summed with must be rounded like what they were multiplied with.
    """
    xw = (x * up).to(x.dtype)
    yw = (y * down).to(y.dtype)
    acc = tl.dot(p, yw, input_precision=PREC)
    dq += up * acc
    dG += xw.to(tl.float32) * acc
    acc = tl.dot(pt, xw, input_precision=PREC)
    if DELTA:
        xw = (-(z * up) * of).to(y.dtype)
        read = tl.dot(p2, yw, input_precision=PREC)
        dread += up * read
        dG += xw.to(tl.float32) * read
        acc = tl.dot(pt2, xw, acc, input_precision=PREC)
    return dq, dw + down * acc, dread, dG - yw.to(tl.float32) * acc


@triton.jit
def by_levels(
    dq, dw, dread, x, y, z, of, p, p2, pt, pt2, g, gc, g_, t, n, d, low, STRIDE: tl.constexpr, D: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What `at_once` gives, for a chunk that needs levels (`levels`), the first of them `low`."""
    up = tl.exp2(g)
    dq *= up
    dw *= tl.exp2(gc[None, :] - g)
    dG = x.to(tl.float32) * dq - y.to(tl.float32) * dw
    inside = tl.sum(y.to(tl.float32) * dw, 0)
    if DELTA:
        dread *= up
        dG -= z.to(tl.float32) * (dread * of)
    for i in range(low - 1, LEVELS):
        up, down, mask = level_weights(g, g_, t, n, d, low, i, STRIDE, D)
        back = tl.trans(mask)
        dq, dw, dread, dG = at_level(
            dq, dw, dread, dG, x, y, z, of, tl.where(mask, p, 0.0), tl.where(mask, p2, 0.0), tl.where(back, pt, 0.0),
            tl.where(back, pt2, 0.0), up, down, DELTA, PREC,
        )  # fmt: skip
    return dq, dw, dread, dG, inside


@triton.jit
def square(x_, y_, t, n, mask, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
           PREC: tl.constexpr):  # fmt: skip
    """X Yᵀ of a chunk [C, C] where `mask` holds, BV of V channels at a time."""
    acc = tl.zeros([C, C], tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        y = tl.trans(tile(y_, t, n, e, H * V, V))
        acc = tl.dot(tile(x_, t, n, e, H * V, V), y, acc, input_precision=PREC)
    return tl.where(mask, acc, 0.0)


@triton.jit
def of_states(do_, u_, r_, states, adjoints, t, n, d, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """(dO S, U dS, dR S, Σ S dS over the value channels), BV of them at a time."""
    dq = tl.zeros([C, BK], tl.float32)
    dw = tl.zeros([C, BK], tl.float32)
    dread = tl.zeros([C, BK], tl.float32)
    edge = tl.zeros([BK], tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        S = tile(states, e, V, d, K, K)
        dS = tile(adjoints, e, V, d, K, K)
        dq = tl.dot(tile(do_, t, n, e, H * V, V), S, dq, input_precision=PREC)
        dw = tl.dot(tile(u_, t, n, e, H * V, V), dS, dw, input_precision=PREC)
        if DELTA:
            dread = tl.dot(tile(r_, t, n, e, H * V, V), S, dread, input_precision=PREC)
        edge += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
    return dq, dw, dread, edge


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    q, k, a, v, F, G, low_, do, u, dv, states, adjoints, dq_, dk_, da_, dg_, dbeta_, table, T, NC, scale,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, LEVELLED: tl.constexpr, DELTA: tl.constexpr, ERASE: tl.constexpr,
    QUERIES: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One chunk, BK key channels a step, a decay each. dq, dk per value head; dβ [B, T, H]. ERASE: what reads the state
    is a [B, T, H, K], and takes the read part of dk.

    `states` and `adjoints` hold S and dS of every chunk, [V, K]. LEVELLED takes the chunks that need levels, otherwise
    those that do not. Squares are found both ways round, since accumulators must not be transposed. dg leaves out pairs
    of a token with itself, where they cancel. QUERIES: dq alone; what only the others need the compiler leaves out.
    """
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low = tl.load(low_ + entry(b, s, h, NC, H))
    if LEVELLED == (low == LEVELS):
        return
    t = tl.arange(0, C)
    e = tl.arange(0, BV)
    dt = k.dtype.element_ty
    at_chunk = entry(b, s, h, NC, H) * (K * V)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    g_ = head(G, b, start, h, T, H, H, K)
    do_ = head(do, b, start, h, T, H, H, V)
    u_ = head(u, b, start, h, T, H, H, V)
    r_ = head(dv, b, start, h, T, H, H, V)
    before = t[:, None] > t[None, :]
    after = t[:, None] < t[None, :]
    p = square(do_, u_, t, n, t[:, None] >= t[None, :], H, V, BV, C, PREC) * scale
    own = tl.sum(tl.where(before, 0.0, p), 1)[:, None]
    p, p2 = parted(tl.where(before, p, 0.0), dt)
    pt, pt2 = parted(square(u_, do_, t, n, after, H, V, BV, C, PREC) * scale, dt)
    of = 1.0
    if DELTA:  # in place of the rests, since the rule itself rounds more
        p2 = square(r_, u_, t, n, before, H, V, BV, C, PREC).to(dt)
        pt2 = square(u_, r_, t, n, after, H, V, BV, C, PREC).to(dt)
        be = tl.load(F + entry(b, s, h, NC, H) * (4 * C) + 3 * C + t)
        of = share(be[:, None], dt)
        dbe = tl.zeros([C], tl.float32)
        for m in range(0, V, BV):
            e = m + tl.arange(0, BV)
            vx = tile(head(v, b, start, h, T, H, H, V), t, n, e, H * V, V)
            dbe += tl.sum(tile(r_, t, n, e, H * V, V).to(tl.float32) * vx.to(tl.float32), 1)
    if V <= BV:
        z = tile(do_, t, n, e, H * V, V)
        w = tile(u_, t, n, e, H * V, V)
        if DELTA:
            r = tile(r_, t, n, e, H * V, V)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        x = tile(q_, t, n, d, HK * K, K).to(dt)
        y = tile(k_, t, n, d, HK * K, K)
        ya = tile(head(a, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
        g = gates_at(g_, tl.minimum(t, n - 1), d, H * K, K)
        gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
        if V <= BV:
            S = tile(states + at_chunk, e, V, d, K, K)
            dS = tile(adjoints + at_chunk, e, V, d, K, K)
            edge = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
            dq = tl.dot(z, S, input_precision=PREC)
            dw = tl.dot(w, dS, input_precision=PREC)
            dread = tl.dot(r, S, input_precision=PREC) if DELTA else dw
        else:
            dq, dw, dread, edge = of_states(
                do_, u_, r_, states + at_chunk, adjoints + at_chunk, t, n, d, H, K, V, BK, BV, C, DELTA, PREC
            )
        dq *= scale
        edge *= tl.exp2(gc)
        if not LEVELLED:
            ref = tl.load(g_ + tl.minimum(C // 2, n - 1) * (H * K) + d, d < K, other=0.0)
            dq, dw, dread, dG, inside = at_once(dq, dw, dread, x, y, ya, of, p, p2, pt, pt2, g, gc, ref, DELTA, PREC)
        else:
            dq, dw, dread, dG, inside = by_levels(
                dq, dw, dread, x, y, ya, of, p, p2, pt, pt2, g, gc, g_, t, n, d, low, H * K, K, LEVELS, DELTA, PREC
            )
        dq += own * y.to(tl.float32)
        dw += own * x.to(tl.float32)
        if DELTA and not QUERIES:
            dbe -= tl.sum(ya.to(tl.float32) * dread, 1)
            if ERASE:
                put(head(da_, b, start, h, T, H, H, K), -(dread * of), t, n, d, H * K, K)
            else:
                dw -= dread * of
        put(head(dq_, b, start, h, T, H, H, K), dq, t, n, d, H * K, K)
        if not QUERIES:
            put(head(dk_, b, start, h, T, H, H, K), dw, t, n, d, H * K, K)
            dg = tl.cumsum(dG, 0, reverse=True) + (edge + inside)[None, :]  # in fp32: most of it may cancel
            put(head(dg_, b, start, h, T, H, H, K), dg, t, n, d, H * K, K)
    if DELTA and not QUERIES:
        tl.store(head(dbeta_, b, start, h, T, H, H, 1) + t * H, dbe / divisor(be, dt), t < n)


def diagonal_gradients(
    plan: SpanPlan, inputs: Inputs, products: ChunkProducts, do: Tensor, chunks: ChunkStates, back: ChunkAdjoints | None
) -> Inputs:
    """The gradients of every chunk's inputs, all chunks at once: those of one reference, then those of levels. back:
    None: that of q alone (not of a rule that erases); the kernel with levels makes the others for nothing, since ptxas
    12.8 has it read a register that nothing wrote where they are left out."""
    (B, T, H, HK, K, V), how, x = plan.sizes, plan.pick(GRADIENT_DIAGONAL), products.saved
    delta, full = plan.rule.write != "additive", plan.dtype == torch.float32
    da = plan.tokens(K) if plan.rule.write == "erase" and back is not None else None
    q, k, v = inputs.qkv
    dq = plan.new(B, T, H, K, dtype=q.dtype)
    dk, dg = plan.tokens(K), torch.empty_like(inputs.g)
    dr, adjoints = (chunks.u, chunks.states) if back is None else (back.dr, back.adjoints)  # or read, but for nothing
    dbeta = plan.new(B, T, H) if delta else None
    # one tile of 32 channels, beside more values: ptxas 12.8 loses the address of products' operands
    block = 64 if K <= 32 < V else max(32, min(how.block, width(K)))
    for levelled in (False, True):
        launch(
            gradient_kernel, (plan.chunk_count, plan.rows),
            *filled(
                q, k, inputs.a, v, x.factors, x.running, x.low, do, chunks.u, dr, chunks.states, adjoints,
                dq, dk, da, dg, dbeta,
            ),
            plan.chunks.table, T, plan.chunk_count, plan.scale, H=H, HK=HK, K=K, V=V,
            BK=block, BV=min(64, width(V)) if full else width(V), C=plan.chunk,
            LEVELS=level_count(plan), LEVELLED=levelled, DELTA=delta, ERASE=da is not None,
            QUERIES=back is None and not levelled, PREC=plan.precision, VARLEN=plan.packed, **how.options,
        )  # fmt: skip
    if back is None:
        return Inputs(dq, None, None)
    return Inputs(dq, dk, value_gradient(plan, inputs, back.dr), dg, dbeta, da)
