"""The gradients of a chunk's inputs under diagonal plus low rank (see `dplr_products`).

With P = scale · dO Yᵀ, P' = scale · dO Vᵀ, E = dR Yᵀ and E' = dR Vᵀ, where R is what M is applied to:

    dq = scale e^G S dO + P b + P' k        dk = e^{G_C−G} dS V + P'ᵀ q + E'ᵀ a
    da =     e^{G'} S dR + E b + E' k       db = e^{G_C−G} dS Y + Pᵀ q + Eᵀ a         (decays inside the sums)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.sizes import cdiv, width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import DPLR_GRADIENT, PAIRS
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.diagonal_gradients import parted, times
from ring_la.kernels.wy.dplr_products import gates_before, weights
from ring_la.kernels.wy.levels import gates_at, level_count, limit
from ring_la.kernels.wy.saved import ChunkAdjoints, ChunkProducts, ChunkStates


@triton.jit(do_not_specialize=SIZES)
def pairs_kernel(
    do, u, dr, P, E, own, table, T, scale, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """scale · dO Uᵀ and dR Uᵀ of one chunk, [B, T, H, C], strictly lower; the first one's diagonal, which no decay
    touches, [B, T, H]."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    at = entry(b, start, h, T, H) * V
    p = tl.zeros([C, C], tl.float32)
    x = tl.zeros([C, C], tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        ux = tl.trans(tile(u + at, t, n, e, H * V, V))
        p = tl.dot(tile(do + at, t, n, e, H * V, V), ux, p, input_precision=PREC)
        x = tl.dot(tile(dr + at, t, n, e, H * V, V), ux, x, input_precision=PREC)
    p *= scale
    strict = t[:, None] > t[None, :]
    put(head(P, b, start, h, T, H, H, C), tl.where(strict, p, 0.0), t, n, t, H * C, C)
    p = tl.sum(tl.where(t[:, None] == t[None, :], p, 0.0), 1)
    tl.store(head(own, b, start, h, T, H, H, 1) + t * H, p, t < n)
    put(head(E, b, start, h, T, H, H, C), tl.where(strict, x, 0.0), t, n, t, H * C, C)


@triton.jit
def between(dx, dy, x, y, wx, wy, p_, mask, t, n, H: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
            PREC: tl.constexpr):  # fmt: skip
    """(dx + P y, dy + Pᵀ x) over the pairs of `mask`, x and y weighed by wx and wy, and what these pairs add to the
    gradient of G where x is read and take from it where y is written. PARTS: 1, 2 for P in two parts, 3 for all.

    Pairs cancel there: what they are summed with is rounded like what they were multiplied with.
    """
    dt = x.dtype
    p, rest = parted(tl.where(mask, tile(p_, t, n, t, H * C, C).to(tl.float32), 0.0), dt)
    xw = x * wx
    yw = y * wy
    if PARTS < 3:
        xw = xw.to(dt).to(tl.float32)
        yw = yw.to(dt).to(tl.float32)
    read = times(p, rest, yw, tl.zeros_like(dx), PARTS > 1, PARTS == 3, PREC)
    written = times(tl.trans(p), tl.trans(rest), xw, tl.zeros_like(dy), PARTS > 1, PARTS == 3, PREC)
    return dx + wx * read, dy + wy * written, xw * read, yw * written


@triton.jit(do_not_specialize=SIZES)
def dplr_gradient_kernel(
    q, k, a, b, v, G, low_, do, y, dr, P, E, Pv, Ev, own_, own_v, states, adjoints, dq_, dk_, da_, db_, dg_, table, T,
    NC, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, LEVELLED: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One chunk, BK key channels; cf. `gradient_kernel`. P, E belong to Y; Pv, Ev to V."""
    NK: tl.constexpr = (K + BK - 1) // BK
    ik = tl.program_id(0) % NK
    s = tl.program_id(0) // NK
    i_b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low = tl.load(low_ + entry(i_b, s, h, NC, H))
    if LEVELLED == (low == LEVELS):
        return
    t = tl.arange(0, C)
    d = ik * BK + tl.arange(0, BK)
    at_chunk = entry(i_b, s, h, NC, H) * (K * V)
    dq = tl.zeros([C, BK], tl.float32)
    da = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    db = tl.zeros([C, BK], tl.float32)
    edges = tl.zeros([BV, BK], tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        S = tile(states + at_chunk, e, V, d, K, K)
        dS = tile(adjoints + at_chunk, e, V, d, K, K)
        dq = tl.dot(tile(head(do, i_b, start, h, T, H, H, V), t, n, e, H * V, V), S, dq, input_precision=PREC)
        da = tl.dot(tile(head(dr, i_b, start, h, T, H, H, V), t, n, e, H * V, V), S, da, input_precision=PREC)
        dk = tl.dot(tile(head(v, i_b, start, h, T, H, H, V), t, n, e, H * V, V), dS, dk, input_precision=PREC)
        db = tl.dot(tile(head(y, i_b, start, h, T, H, H, V), t, n, e, H * V, V), dS, db, input_precision=PREC)
        edges += S.to(tl.float32) * dS.to(tl.float32)
    xq = tile(head(q, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    yk = tile(head(k, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    yb = tile(head(b, i_b, start, h, T, H, H, K), t, n, d, H * K, K)
    g_ = head(G, i_b, start, h, T, H, H, K)
    g = gates_at(g_, tl.minimum(t, n - 1), d, H * K, K)
    gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
    own = tl.load(head(own_, i_b, start, h, T, H, H, 1) + t * H, t < n, other=0.0)[:, None]
    own_k = tl.load(head(own_v, i_b, start, h, T, H, H, 1) + t * H, t < n, other=0.0)[:, None]
    w = tl.exp2(gc[None, :] - g)
    dk *= w
    db *= w
    edge = tl.sum(edges, 0) * tl.exp2(gc) + tl.sum(yk.to(tl.float32) * dk + yb.to(tl.float32) * db, 0)
    dq *= scale * tl.exp2(g)
    dG = xq.to(tl.float32) * dq - yk.to(tl.float32) * dk - yb.to(tl.float32) * db
    dq += own * yb.to(tl.float32) + own_k * yk.to(tl.float32)  # a token's pair with itself: no decay, none in dG
    dk += own_k * xq.to(tl.float32)
    db += own * xq.to(tl.float32)
    p_ = head(P, i_b, start, h, T, H, H, C)
    e_ = head(E, i_b, start, h, T, H, H, C)
    pv_ = head(Pv, i_b, start, h, T, H, H, C)
    ev_ = head(Ev, i_b, start, h, T, H, H, C)
    if not LEVELLED:  # one reference serves the whole chunk
        ref = tl.load(g_ + tl.minimum(C // 2, n - 1) * (H * K) + d, d < K, other=0.0)[None, :]
        wq = tl.exp2(g - ref)
        wk = tl.exp2(ref - g)
        mask = t[:, None] > t[None, :]
        dq, db, read, written = between(dq, db, xq, yb, wq, wk, p_, mask, t, n, H, C, 1, PREC)
        dG += read - written
        dq, dk, read, written = between(dq, dk, xq, yk, wq, wk, pv_, mask, t, n, H, C, 3, PREC)
        dG += read - written
        put(head(dq_, i_b, start, h, T, H, H, K), dq, t, n, d, H * K, K)
    xa = tile(head(a, i_b, start, h, T, H, H, K), t, n, d, H * K, K)
    gp = gates_before(g_, t, n, d, H * K, K)
    da *= tl.exp2(gp)
    reads = xa.to(tl.float32) * da  # at G', so only from the next token on
    if not LEVELLED:
        wa = tl.exp2(tl.minimum(gp - ref, LIMIT))
        da, db, read, written = between(da, db, xa, yb, wa, wk, e_, mask, t, n, H, C, 1, PREC)
        reads += read
        dG -= written
        da, dk, read, written = between(da, dk, xa, yk, wa, wk, ev_, mask, t, n, H, C, 2, PREC)
        reads += read
        dG -= written
    else:
        for i in range(low - 1, LEVELS):
            wq, wa, wk, mask = weights(g, gp, g_, t, n, d, low, i, H * K, K, LIMIT)
            dq, db, read, written = between(dq, db, xq, yb, wq, wk, p_, mask, t, n, H, C, 1, PREC)
            dG += read - written
            dq, dk, read, written = between(dq, dk, xq, yk, wq, wk, pv_, mask, t, n, H, C, 1, PREC)
            dG += read - written
            da, db, read, written = between(da, db, xa, yb, wa, wk, e_, mask, t, n, H, C, 1, PREC)
            reads += read
            dG -= written
            da, dk, read, written = between(da, dk, xa, yk, wa, wk, ev_, mask, t, n, H, C, 1, PREC)
            reads += read
            dG -= written
        put(head(dq_, i_b, start, h, T, H, H, K), dq, t, n, d, H * K, K)
    put(head(dk_, i_b, start, h, T, H, H, K), dk, t, n, d, H * K, K)
    put(head(da_, i_b, start, h, T, H, H, K), da, t, n, d, H * K, K)
    put(head(db_, i_b, start, h, T, H, H, K), db, t, n, d, H * K, K)
    dg = tl.cumsum(dG + reads, 0, reverse=True) - reads + edge[None, :]
    put(head(dg_, i_b, start, h, T, H, H, K), dg, t, n, d, H * K, K)


def dplr_gradients(
    plan: SpanPlan, inputs: Inputs, products: ChunkProducts, do: Tensor, chunks: ChunkStates, back: ChunkAdjoints
) -> Inputs:
    """The gradients of every chunk's inputs, all chunks at once."""
    q, k, v, g, _, a, b = inputs
    (_, T, H, HK, K, V), how = plan.sizes, plan.pick(DPLR_GRADIENT)
    P, E, own = _pairs(plan, do, chunks.u, back.dr, False)
    Pv, Ev, own_v = _pairs(plan, do, v, back.dr, True)  # most of what is wanted; what comes by Y is rounded with Y
    block = min(how.block, width(K))
    dq, dk, da, db = (plan.tokens(K) for _ in range(4))
    dg = torch.empty_like(g)
    for levelled in (False, True):
        launch(
            dplr_gradient_kernel, (plan.chunk_count * cdiv(K, block), plan.rows), q, k, a, b, v,
            products.saved.running, products.saved.low, do, chunks.u, back.dr, P, E, Pv, Ev, own, own_v, chunks.states,
            back.adjoints, dq, dk, da, db, dg, plan.chunks.table, T, plan.chunk_count, plan.scale, H=H, HK=HK, K=K,
            V=V, BK=block, BV=min(64, width(V)), C=plan.chunk, LEVELS=level_count(plan), LIMIT=limit(plan),
            LEVELLED=levelled, PREC=plan.precision, VARLEN=plan.packed, **how.options,
        )  # fmt: skip
    return Inputs(dq, dk, back.dv, dg, None, da, db)


def _pairs(plan: SpanPlan, do: Tensor, u: Tensor, dr: Tensor, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(P, E, P's diagonal) of every chunk, `fine`: in fp32; see `pairs_kernel`."""
    (B, T, H, _, _, V), how = plan.sizes, plan.pick(PAIRS)
    dtype = torch.float32 if fine else plan.dtype
    P, E = (plan.new(B, T, H, plan.chunk, dtype=dtype) for _ in "PE")
    own = plan.new(B, T, H)
    launch(
        pairs_kernel, (plan.chunk_count, plan.rows), do, u, dr, P, E, own, plan.chunks.table, T, plan.scale, H=H, V=V,
        BV=min(how.block, width(V)), C=plan.chunk, PREC=plan.precision, VARLEN=plan.packed, **how.options,
    )  # fmt: skip
    return P, E, own
