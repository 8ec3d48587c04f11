"""A chunk's gradients under delta writes with a scalar decay or none: `gradient`'s equations, with the pairs found on
the way.

All channels of a token share its decays, so P, E and the rest come from one loop over the value channels. What k is
written with is held transposed: its products then need P and E as right operands only, since accumulators must not be
transposed into left ones (see docs/developers/kernels.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import cdiv, width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import GRADIENT, VALUE_STEP
from ring_la.kernels.triton.gates import divisor, share
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.backward import value_gradient
from ring_la.kernels.wy.saved import ChunkAdjoints, ChunkProducts, ChunkStates


@triton.jit(do_not_specialize=SIZES)
def delta_gradient_kernel(
    q, k, a, v, F, do, u, dv, states, adjoints, dq_, dk_, da_, dg_, dbeta_, table, T, NC, scale, H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATED: tl.constexpr, ERASE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One chunk, BK key channels. dq, dk per value head; dβ and dg per block of channels, [NK, B, T, H]. ERASE: what
    reads the state is a [B, T, H, K], and takes the read part of dk.

    `states` and `adjoints` hold S and dS of every chunk, [V, K].
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    ik = tl.program_id(0) % NK
    s = tl.program_id(0) // NK
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    d = ik * BK + tl.arange(0, BK)
    at = entry(b, start, h, T, H) * V
    f = F + entry(b, s, h, NC, H) * (4 * C)
    at_chunk = entry(b, s, h, NC, H) * (K * V)
    p = tl.zeros([C, C], tl.float32)
    r = tl.zeros([C, C], tl.float32)
    dq = tl.zeros([C, BK], tl.float32)
    dread = tl.zeros([C, BK], tl.float32)
    dw = tl.zeros([BK, C], tl.float32)
    edges = tl.zeros([BV], tl.float32)
    dbe = tl.zeros([C], tl.float32)
    for m in range(0, V, BV):
        e = m + tl.arange(0, BV)
        x = tile(do + at, t, n, e, H * V, V)
        y = tile(dv + at, t, n, e, H * V, V)
        w = tl.trans(tile(u + at, t, n, e, H * V, V))
        S = tile(states + at_chunk, e, V, d, K, K)
        dS = tile(adjoints + at_chunk, e, V, d, K, K)
        vx = tile(v + at, t, n if ik == 0 else 0, e, H * V, V)  # what feeds no product is not prefetched: before them
        p = tl.dot(x, w, p, input_precision=PREC)
        r = tl.dot(y, w, r, input_precision=PREC)
        dq = tl.dot(x, S, dq, input_precision=PREC)
        dread = tl.dot(y, S, dread, input_precision=PREC)
        dw = tl.dot(tl.trans(dS), w, dw, input_precision=PREC)
        if GATED:
            edges += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        dbe += tl.sum(y.to(tl.float32) * vx.to(tl.float32), 1)
    x = tile(head(q, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    y = tile(head(k, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
    z = tile(head(a, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
    part = ((ik * (tl.num_programs(1) // H) + b).to(tl.int64) * T + start + t) * H + h
    p *= scale
    dq *= scale
    if GATED:
        g = tl.load(f + t)
        down = tl.exp2(tl.where(t[:, None] >= t[None, :], g[:, None] - g[None, :], float("-inf")))
        p *= down
        r *= down
        w = tl.load(f + C + t)[:, None]
        dq *= w
        dread *= w
        dw *= tl.load(f + 2 * C + t)[None, :]
        passed = tl.sum(edges, 0) * tl.exp2(tl.load(f + C - 1))
        passed += tl.sum(tl.trans(y).to(tl.float32) * dw)
    p = tl.where(t[:, None] >= t[None, :], p, 0.0).to(x.dtype)
    r = tl.where(t[:, None] > t[None, :], r, 0.0)
    of = share(tl.load(f + 3 * C + t)[:, None], x.dtype)
    dq = tl.dot(p, y, dq, input_precision=PREC)
    dw = tl.dot(tl.trans(x), p, dw, input_precision=PREC)
    dread = tl.dot(r.to(x.dtype), y, dread, input_precision=PREC)
    dw = tl.dot(tl.trans(z), (-(r * of)).to(x.dtype), dw, input_precision=PREC)
    put(head(dq_, b, start, h, T, H, H, K), dq, t, n, d, H * K, K)
    yf = y.to(tl.float32)
    zf = z.to(tl.float32)
    be = divisor(tl.load(f + 3 * C + t), y.dtype)
    tl.store(dbeta_ + part, (dbe - tl.sum(zf * dread, 1)) / be, t < n)
    dread *= of
    dk = tl.trans(dw)
    if ERASE:
        put(head(da_, b, start, h, T, H, H, K), -dread, t, n, d, H * K, K)
        put(head(dk_, b, start, h, T, H, H, K), dk, t, n, d, H * K, K)
    else:
        put(head(dk_, b, start, h, T, H, H, K), dk - dread, t, n, d, H * K, K)
    if GATED:
        if ERASE:
            rows = tl.sum(x.to(tl.float32) * dq - yf * dk - zf * dread, 1)
        else:
            rows = tl.sum(x.to(tl.float32) * dq - yf * (dk + dread), 1)
        tl.store(dg_ + part, tl.cumsum(rows, 0, reverse=True) + passed, t < n)


def delta_gradients(
    plan: SpanPlan, inputs: Inputs, products: ChunkProducts, do: Tensor, chunks: ChunkStates, back: ChunkAdjoints
) -> Inputs:
    """The gradients of every chunk's inputs, all chunks at once."""
    (B, T, H, HK, K, V), how, decay = plan.sizes, plan.pick(GRADIENT), plan.rule.decay
    erase, gluon = plan.rule.write == "erase", plan.gluon and plan.rule.write == "delta"
    block = max(32, min(how.block, width(K)))  # the transposed products go wrong at 16 columns
    if decay == "none" and K <= 32 < V <= 64:  # one tile of 32: ptxas 12.8 loses the address of products' operands
        block = 64
    parts = 1 if gluon else cdiv(K, block)
    dq, dk, dbeta = plan.tokens(K), plan.tokens(K), plan.new(*(parts,)[: parts > 1], B, T, H)
    dg = None if decay == "none" else torch.empty_like(dbeta)
    da = plan.tokens(K) if erase else None
    (q, k, v), found = inputs.qkv, (do, chunks.u, back.dr, chunks.states, back.adjoints, dq, dk)
    where = plan.chunks.table, T, plan.chunk_count, plan.scale
    shape: dict[str, Any] = dict(H=H, HK=HK, K=K, V=V, C=plan.chunk, GATED=decay == "scalar", VARLEN=plan.packed)
    if gluon:
        from ring_la.kernels.wy.delta_gradients_hopper import delta_gradient_hopper_kernel

        given = filled(q, k, v, products.saved.factors, *found, dg, dbeta)
        launch(delta_gradient_hopper_kernel, (plan.chunk_count * H, B), *given, *where, **shape, num_warps=4)
    else:
        launch(
            delta_gradient_kernel, (plan.chunk_count * parts, plan.rows),
            *filled(q, k, inputs.a, v, products.saved.factors, *found, da, dg, dbeta), *where, **shape, ERASE=erase,
            BK=block, BV=min(VALUE_STEP[decay], width(V)), PREC=plan.precision, **how.options,
        )  # fmt: skip
    dg = None if dg is None else _total(dg)
    return Inputs(dq, dk, value_gradient(plan, inputs, back.dr), dg, _total(dbeta), da)


def _total(parts: Tensor) -> Tensor:
    """The sum of what blocks of channels found ``[blocks, B, T, H]``, or a single one ``[B, T, H]``."""
    return parts if parts.dim() == 3 else parts.sum(0)
