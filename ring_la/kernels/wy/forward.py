"""The pass that carries the state through a span, for delta writes and for a decay per key channel.

Over a chunk of C tokens with the state S before it, G the running log-decay, A and M (as M − I) from `products`:

    U = M β (V − e^G K S)      (additive writes: U = V)
    O = scale · e^G Q S + A U
    S ← e^{G_C} S + (e^{G_C−G} K)ᵀ U

Everything is held transposed, [V, …]: each product's left operand is then the last one's result, in registers. A decay
per key channel comes multiplied into q and k (`products`); a scalar one as factors by token (`gates`). A span's own map
is found by the same pass: b from S = 0, and the dense transition's columns from V = 0 and S = I.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import SpanMaps
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import cdiv, width
from ring_la.kernels.spans.plan import DECAY, SpanPlan
from ring_la.kernels.spans.table import KEEP, OUTPUT, SUMMARY, SUMMARY_ALL, Table
from ring_la.kernels.triton.horizon import remembered
from ring_la.kernels.triton.tiles import SIZES, entry, head, put, span, tile
from ring_la.kernels.wy.saved import ChunkProducts, ChunkStates


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, kr, kw, kv, v, F, bounds, G, A, Av, L, M, state, o, u, states, leaving, trans, log_a, table, T, NS, NC, N,
    LENGTH, scale, H: tl.constexpr, HK: tl.constexpr, HR: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr,
    APART: tl.constexpr, DPLR: tl.constexpr,
    SUMMARY: tl.constexpr, ALL: tl.constexpr, HORIZON: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr,
    HAS_STATE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One span, BV columns of the state. q and kr are read against the state, kw is written to it (HK heads; kr
    HR, and APART where it is not kw).

    SUMMARY: state ← b and, by the programs beyond V's columns, trans ← A; ALL: also what no later span of this
    launch needs; HORIZON: nothing the span forgets. Otherwise `state` is read, OUT writes o and the piece's last
    state, KEEP writes U and the state before each chunk, [V, K]. DPLR: U is Y, and V a second stream with its own kv,
    Av and L (`dplr`). DECAY: 0 none, 1 scalar, 2 per key channel (G [B, T, H, K]); F: `factors`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    COLUMNS: tl.constexpr = NV + ((K + BV - 1) // BV if SUMMARY and (DELTA or DPLR) else 0)
    iv = tl.program_id(0) % COLUMNS
    s = tl.program_id(0) // COLUMNS
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, chunk, first, last = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    eye = iv >= NV
    if SUMMARY and not ALL:
        if last or (eye and first):
            return
    d = tl.arange(0, BK)
    e = (iv - NV if eye else iv) * BV + tl.arange(0, BV)
    t = tl.arange(0, C)
    row = entry(b, s, h, NS, H)
    kr_ = head(kr, b, start, h, T, HR, H, K)
    kw_ = head(kw, b, start, h, T, HK, H, K)
    q_ = head(q, b, start, h, T, HK, H, K)
    v_ = head(v, b, start, h, T, H, H, V)
    a_ = head(A, b, start, h, T, H, H, C)
    m_ = head(M, b, start, h, T, H, H, C)
    o_ = head(o, b, start, h, T, H, H, V)
    u_ = head(u, b, start, h, T, H, H, V)
    f_ = F + entry(b, chunk, h, NC, H) * (4 * C)
    g_ = head(G, b, start, h, T, H, H, K)
    at = d[None, :] * V + e[:, None]
    inside = (e < V)[:, None] & (d < K)[None, :]
    S = tl.zeros([BV, BK], tl.float32)
    if SUMMARY:
        S += tl.where(eye & (e[:, None] == d[None, :]), 1.0, 0.0)
    elif HAS_STATE:
        S = tl.load(state + row * (K * V) + at, inside, other=0.0)
    total = tl.zeros([BK], tl.float32)
    n = (left + C - 1) // C
    i0 = 0
    if HORIZON:
        count, passes, _ = remembered(bounds + (b.to(tl.int64) * H + h) * NC + chunk + n - 1, -1, n)
        if eye:
            count = tl.where(passes, n, 0)
            S = tl.where(passes, S, 0.0)
        i0 = n - count
    for i in range(i0, n):
        c = i * C
        f = f_ + i * (H * 4 * C)
        if DECAY == 1:
            gc = tl.exp2(tl.load(f + C - 1))  # before what is prefetched is awaited
        x = tile(kw_ + c * (HK * K), t, left - c, d, HK * K, K)
        # the programs of the transition's columns have no v: no row is inside
        w = tl.trans(tile(v_ + c * (H * V), t, tl.where(eye, 0, left - c), e, H * V, V))
        Sx = S.to(x.dtype)
        if KEEP:
            at_chunk = entry(b, chunk + i, h, NC, H) * (K * V)
            put(states + at_chunk, Sx, e, V, d, K, K)
        if DECAY == 1:
            S *= gc
        if DECAY == 2:
            gc = tl.load(g_ + (tl.minimum(c + C, left) - 1) * (H * K) + d, d < K, other=0.0)
            total += gc
            S *= tl.exp2(gc)[None, :]
        if DELTA:
            xr = tile(kr_ + c * (HR * K), t, left - c, d, HR * K, K) if APART else x
            r = tl.dot(Sx, tl.trans(xr), input_precision=PREC)
            if DECAY == 1:
                r *= tl.load(f + C + t)[None, :]
            be = tl.load(f + 3 * C + t)
            r = (w.to(tl.float32) - r) * be[None, :]
        elif DPLR:
            xr = tile(kr_ + c * (HR * K), t, left - c, d, HR * K, K)
            m = tile(head(L, b, start, h, T, H, H, C) + c * (H * C), t, left - c, t, H * C, C)
            r = tl.dot(w, tl.trans(m), input_precision=PREC)
            r = tl.dot(Sx, tl.trans(xr), r, input_precision=PREC)
        if DELTA or DPLR:
            m = tile(m_ + c * (H * C), t, left - c, t, H * C, C)
            uf = tl.dot(r.to(x.dtype), tl.trans(m), r, input_precision=PREC)
            ux = uf.to(x.dtype)
            if KEEP:
                put(u_ + c * (H * V), tl.trans(ux), t, left - c, e, H * V, V)
        else:
            uf = w
            ux = w
        if OUT:
            y = tile(q_ + c * (HK * K), t, left - c, d, HK * K, K)
            acc = tl.dot(Sx, tl.trans(y), input_precision=PREC)
            acc *= (tl.load(f + C + t) * scale)[None, :] if DECAY == 1 else scale
            p = tl.trans(tile(a_ + c * (H * C), t, left - c, t, H * C, C))
            acc = tl.dot(ux, p, acc, input_precision=PREC)
            if DPLR:
                p = tl.trans(tile(head(Av, b, start, h, T, H, H, C) + c * (H * C), t, left - c, t, H * C, C))
                acc = tl.dot(w, p, acc, input_precision=PREC)
            put(o_ + c * (H * V), tl.trans(acc), t, left - c, e, H * V, V)
        if DECAY == 1:
            ux = (uf * tl.load(f + 2 * C + t)[None, :]).to(x.dtype)
        S = tl.dot(ux, x, S, input_precision=PREC)
        if DPLR:
            x = tile(head(kv, b, start, h, T, HK, H, K) + c * (HK * K), t, left - c, d, HK * K, K)
            S = tl.dot(w, x, S, input_precision=PREC)
    if SUMMARY:
        if eye:
            tl.store(trans + row * (K * K) + d[None, :] * K + e[:, None], S, (e < K)[:, None] & (d < K)[None, :])
        else:
            tl.store(state + row * (K * V) + at, S, inside)
        if DECAY == 2 and not (DELTA or DPLR) and iv == 0:
            tl.store(log_a + row * K + d, total, d < K)
    elif OUT and last:
        tl.store(leaving + entry(b, piece, h, N, H) * (K * V) + at, S, inside)


class ForwardTensors(NamedTuple):
    """What the pass reads and fills beside the chunks' products, as far as it is there: the states that enter the spans
    (for a summary what spans add), o, U and the states before the chunks, those leaving the pieces, and transitions."""

    state: Tensor | None = None
    o: Tensor | None = None
    chunks: ChunkStates | None = None
    leaving: Tensor | None = None
    transition: Tensor | None = None


def maps_of_spans(plan: SpanPlan, products: ChunkProducts, v: Tensor, all: bool) -> SpanMaps:
    """What each span adds, and its transition. Not `all`: only what one call needs that starts and ends with no
    state."""
    own, (*_, K, _) = plan.states_of_spans(), plan.sizes
    transition = plan.new(*own.shape[:4], K) if plan.dense else plan.new(*own.shape[:4])
    tensors = ForwardTensors(state=own, transition=transition)
    horizon = all and products.saved.bounds is not None
    summary = dict(SUMMARY=True, ALL=all, HORIZON=horizon)
    _forward(plan, products, v, SUMMARY_ALL if all else SUMMARY, tensors, summary)
    return SpanMaps(plan.rule.transition, own, transition, all)


def output(
    plan: SpanPlan, products: ChunkProducts, v: Tensor, entering: Tensor | None, leaving: Tensor,
    chunks: ChunkStates | None, entries: Table = OUTPUT,
) -> Tensor:  # fmt: skip
    """o, given the states that enter the spans (None: zero); `leaving` and `chunks` are filled, too."""
    o = plan.tokens(plan.sizes.V)
    _forward(plan, products, v, entries, ForwardTensors(entering, o, chunks, leaving))
    return o


def states_before_chunks(plan: SpanPlan, products: ChunkProducts, v: Tensor, entering: Tensor | None) -> ChunkStates:
    """U and the states, from those that enter the spans."""
    room = room_for_states(plan, v)
    _forward(plan, products, v, KEEP, ForwardTensors(entering, chunks=room))
    return room


def room_for_states(plan: SpanPlan, v: Tensor) -> ChunkStates:
    B, _, H, _, K, V = plan.sizes
    states = plan.new(B, plan.chunk_count, H, V, K, dtype=plan.dtype)
    return ChunkStates(torch.empty_like(v) if plan.dense else v, states)


NO_SUMMARY = dict(SUMMARY=False, ALL=False, HORIZON=False)


def _forward(
    plan: SpanPlan, products: ChunkProducts, v: Tensor, entries: Table, tensors: ForwardTensors,
    summary: dict[str, Any] = NO_SUMMARY,
) -> None:  # fmt: skip
    how, spans, (_, T, _, _, K, V) = plan.pick(entries), plan.spans, plan.sizes
    (q, reads, writes, value_writes, x), (state, o, chunks, leaving, transition) = products, tensors
    block = min(how.block, width(V))
    columns = cdiv(V, block) + (cdiv(K, block) if summary["SUMMARY"] and plan.dense else 0)
    launch(
        forward_kernel, (columns * spans.count, plan.rows),
        *filled(
            q, reads, writes, value_writes, v, x.factors, x.bounds, x.running, x.pairs, x.value_pairs, x.value_reads,
            x.inverse, state, o, *(chunks or (None, None)), leaving, transition, transition,
        ),
        spans.table, T, spans.count, plan.chunk_count, spans.pieces, spans.length, plan.scale,
        **shared_constants(plan, block), **summary, OUT=o is not None, KEEP=chunks is not None,
        HAS_STATE=state is not None, **how.options,
    )  # fmt: skip


def shared_constants(plan: SpanPlan, block: int) -> dict[str, Any]:
    """The constants both passes share."""
    (_, _, H, HK, K, V), rule = plan.sizes, plan.rule
    weighed, erase = rule.decay == "diagonal", rule.write == "erase"
    return dict(
        H=H, HK=H if weighed else HK, HR=H if weighed or erase else HK, K=K, V=V, BK=width(K), BV=block, C=plan.chunk,
        DECAY=DECAY[rule.decay], DELTA=rule.write in ("delta", "erase"), APART=weighed or erase,
        DPLR=rule.write == "dplr", PREC=plan.precision,
        VARLEN=plan.packed,
    )  # fmt: skip
