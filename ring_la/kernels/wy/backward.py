"""The pass that carries the state's gradient through a span, right to left; the adjoint of `forward`.

With dS the gradient of the state after a chunk and dR that of R = β(V − e^G K S):

    dU = Aᵀ dO + (e^{G_C−G} K) dS,     dR = dU + (M − I)ᵀ dU      (additive writes: dV = dU)
    dS ← e^{G_C} dS + scale · (e^G Q)ᵀ dO − (e^G K)ᵀ (β dR)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs, SpanMaps
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import cdiv, width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import BACK_SUMMARY, BACKWARD, Table
from ring_la.kernels.triton.gates import LEAST_HALF, divisor
from ring_la.kernels.triton.tiles import SIZES, entry, head, put, span, tile
from ring_la.kernels.wy.forward import shared_constants
from ring_la.kernels.wy.saved import ChunkAdjoints, ChunkProducts, ChunkStates, fine


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    q, kr, kw, kv, do, F, G, A, Ar, Av, L, M, state, dr, dv_, states, leaving, log_a, table, T, NS, NC, N, LENGTH,
    scale, H: tl.constexpr, HK: tl.constexpr, HR: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, APART: tl.constexpr,
    DPLR: tl.constexpr, SUMMARY: tl.constexpr, ALL: tl.constexpr, FINE: tl.constexpr,
    HAS_STATE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One span, BV columns, everything transposed as in `forward`. SUMMARY: state ← what the span adds. Otherwise
    `state` is read and written: dV (under delta writes β dR; dplr: dR, and dV apart), the gradient of the state after
    each chunk [V, K], and that of the state entering the piece. FINE: A is A + Ar."""
    NV: tl.constexpr = (V + BV - 1) // BV
    iv = tl.program_id(0) % NV
    s = tl.program_id(0) // NV
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, _ = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    if SUMMARY and not ALL and first:
        return
    d = tl.arange(0, BK)
    e = iv * BV + tl.arange(0, BV)
    t = tl.arange(0, C)
    row = entry(b, s, h, NS, H)
    kr_ = head(kr, b, start, h, T, HR, H, K)
    kw_ = head(kw, b, start, h, T, HK, H, K)
    q_ = head(q, b, start, h, T, HK, H, K)
    do_ = head(do, b, start, h, T, H, H, V)
    dr_ = head(dr, b, start, h, T, H, H, V)
    a_ = head(A, b, start, h, T, H, H, C)
    m_ = head(M, b, start, h, T, H, H, C)
    f_ = F + entry(b, chunk, h, NC, H) * (4 * C)
    g_ = head(G, b, start, h, T, H, H, K)
    at = d[None, :] * V + e[:, None]
    inside = (e < V)[:, None] & (d < K)[None, :]
    # S in units of the scale, so that dO meets q as it came: not under a decay by token, which rounds it anyway, nor in
    # fp16, where it might overflow
    whole: tl.constexpr = DECAY == 1 or q.dtype.element_ty == tl.float16
    unit = 1.0 if whole else tl.where(scale == 0.0, 1.0, scale)
    rest = scale / unit
    S = tl.zeros([BV, BK], tl.float32)
    if not SUMMARY and HAS_STATE:
        S = tl.load(state + row * (K * V) + at, inside, other=0.0) / unit
    total = tl.zeros([BK], tl.float32)
    n = (left + C - 1) // C
    for j in range(n):
        i = n - 1 - j
        c = i * C
        f = f_ + i * (H * 4 * C)
        if DECAY == 1:
            gc = tl.exp2(tl.load(f + C - 1))  # before what is prefetched is awaited
        y = tile(q_ + c * (HK * K), t, left - c, d, HK * K, K)
        z = tl.trans(tile(do_ + c * (H * V), t, left - c, e, H * V, V))
        Sx = (S * unit).to(y.dtype)
        if DELTA:
            be = tl.zeros([C], tl.float32)
            if c < left:  # always, but what a branch loads is not prefetched: two programs' shared memory just fits
                be = tl.load(f + 3 * C + t)
        if not SUMMARY:
            at_chunk = entry(b, chunk + i, h, NC, H) * (K * V)
            put(states + at_chunk, Sx, e, V, d, K, K)
        zf = z.to(tl.float32)
        if DECAY == 1:
            read = tl.load(f + C + t)
            S *= gc
            zf *= (read * scale)[None, :]
        else:
            zf *= rest
        if DECAY == 2:
            gc = tl.load(g_ + (tl.minimum(c + C, left) - 1) * (H * K) + d, d < K, other=0.0)
            total += gc
            S *= tl.exp2(gc)[None, :]
        if DELTA or DPLR or not SUMMARY:
            x = tile(kw_ + c * (HK * K), t, left - c, d, HK * K, K)
            du = tl.dot(Sx, tl.trans(x), input_precision=PREC)
            if DECAY == 1:
                du *= tl.load(f + 2 * C + t)[None, :]
            p = tile(a_ + c * (H * C), t, left - c, t, H * C, C)
            du = tl.dot(z, p, du, input_precision=PREC)
            if FINE:
                p = tile(head(Ar, b, start, h, T, H, H, C) + c * (H * C), t, left - c, t, H * C, C)
                du = tl.dot(z, p, du, input_precision=PREC)
            if DELTA or DPLR:
                m = tile(m_ + c * (H * C), t, left - c, t, H * C, C)
                du = tl.dot(du.to(x.dtype), m, du, input_precision=PREC)
            if not SUMMARY:
                w = du * divisor(be, x.dtype)[None, :] if DELTA else du
                put(dr_ + c * (H * V), tl.trans(w), t, left - c, e, H * V, V)
                if DPLR:
                    p = tile(head(Av, b, start, h, T, H, H, C) + c * (H * C), t, left - c, t, H * C, C)
                    dv = tl.dot(z, p, input_precision=PREC)
                    p = tile(head(L, b, start, h, T, H, H, C) + c * (H * C), t, left - c, t, H * C, C)
                    dv = tl.dot(du.to(x.dtype), p, dv, input_precision=PREC)
                    p = tile(head(kv, b, start, h, T, HK, H, K) + c * (HK * K), t, left - c, d, HK * K, K)
                    dv = tl.dot(Sx, tl.trans(p), dv, input_precision=PREC)
                    put(head(dv_, b, start, h, T, H, H, V) + c * (H * V), tl.trans(dv), t, left - c, e, H * V, V)
        S = tl.dot(zf.to(y.dtype), y, S, input_precision=PREC)
        if DELTA:
            reads = du * (-be * read if DECAY == 1 else -be / unit)[None, :]
            xr = tile(kr_ + c * (HR * K), t, left - c, d, HR * K, K) if APART else x
            S = tl.dot(reads.to(x.dtype), xr, S, input_precision=PREC)
        if DPLR:
            xr = tile(kr_ + c * (HR * K), t, left - c, d, HR * K, K)
            S = tl.dot((du / unit).to(x.dtype), xr, S, input_precision=PREC)
    if SUMMARY:
        tl.store(state + row * (K * V) + at, S * unit, inside)
        if DECAY == 2 and not (DELTA or DPLR) and iv == 0:
            tl.store(log_a + row * K + d, total, d < K)
    elif first:
        tl.store(leaving + entry(b, piece, h, N, H) * (K * V) + at, S * unit, inside)


class BackwardTensors(NamedTuple):
    """What the pass reads and fills beside do and the chunks' products, as far as it is there: the gradients of the
    states after the spans (for a summary what spans add to them), those of the chunks, of the states that enter the
    pieces, and log-decays."""

    state: Tensor | None = None
    chunks: ChunkAdjoints | None = None
    leaving: Tensor | None = None
    log_decay: Tensor | None = None


def maps_back(plan: SpanPlan, products: ChunkProducts, do: Tensor, transition: Tensor | None, all: bool) -> SpanMaps:
    """What each span adds to the state's gradient, and its transition: that of the way forward where it is dense."""
    own = plan.states_of_spans()
    log_decay = None if plan.dense else plan.new(*own.shape[:4])
    _backward(plan, products, do, BACK_SUMMARY, BackwardTensors(own, log_decay=log_decay), True, all)
    return SpanMaps(plan.rule.transition, own, transition if plan.dense else log_decay, all)


def adjoints_after_chunks(
    plan: SpanPlan, products: ChunkProducts, do: Tensor, states: ChunkStates, adjoint: Tensor | None, dS0: Tensor,
    entries: Table = BACKWARD,
) -> ChunkAdjoints:  # fmt: skip
    """From the gradients of the states after the spans (None: zero); `dS0` takes those of the states that enter the
    pieces. `states`: of the same chunks."""
    adjoints, dr = torch.empty_like(states.states), torch.empty_like(do)
    found = ChunkAdjoints(adjoints, dr, torch.empty_like(dr) if plan.rule.write == "dplr" else None)
    _backward(plan, products, do, entries, BackwardTensors(adjoint, found, dS0), False, False)
    return found


def _backward(
    plan: SpanPlan, products: ChunkProducts, do: Tensor, entries: Table, tensors: BackwardTensors, summary: bool,
    all: bool,
) -> None:  # fmt: skip
    how, spans, (_, T, _, _, _, V) = plan.pick(entries), plan.spans, plan.sizes
    (q, reads, writes, value_writes, x), (state, chunks, leaving, log_decay) = products, tensors
    adjoints, dr, dv = chunks or (None, None, None)
    block = min(how.block, width(V))
    launch(
        backward_kernel, (cdiv(V, block) * spans.count, plan.rows),
        *filled(
            q, reads, writes, value_writes, do, x.factors, x.running, x.pairs, x.pairs_rest, x.value_pairs,
            x.value_reads, x.inverse, state, dr, dv, adjoints, leaving, log_decay,
        ),
        spans.table, T, spans.count, plan.chunk_count, spans.pieces, spans.length, plan.scale,
        **shared_constants(plan, block), SUMMARY=summary, ALL=all, FINE=fine(plan), HAS_STATE=state is not None,
        **how.options,
    )  # fmt: skip


def value_gradient(plan: SpanPlan, inputs: Inputs, dr: Tensor) -> Tensor:
    """dv: under delta writes β dR, where the pass left `divisor` · dR. In fp16 they differ by more than rounding."""
    if plan.rule.write not in ("delta", "erase") or dr.dtype != torch.float16:
        return dr
    beta = inputs.beta.float()
    return dr * torch.where(beta.abs() < LEAST_HALF.value, beta / LEAST_HALF.value, 1.0).to(dr.dtype)[..., None]
