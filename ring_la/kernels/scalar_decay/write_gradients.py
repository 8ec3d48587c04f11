"""dk and dv of additive writes in one pass from right to left: both read the adjoint state, R = dSᵀ [V, K].

They are `attend`'s roles dv: (k, q, do) and dk: (v, do, q), with four loads for both instead of six. The state goes
through shared memory once a chunk, as the right operand of k R and, transposed, of v R. It must fit one program: head
sizes up to 128. Without a decay, or with one that is the same at every token and whose gradient nobody wants:
`chunk_gradients` is for the others.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.scalar_decay.operands import Gates, columns, constant, rows, shared_constants, take, tiles
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import WRITES
from ring_la.kernels.triton.tiles import SIZES, put, span


@triton.jit(do_not_specialize=SIZES)
def writes_kernel(
    Q, K_, V_, DO, F, entering, DK, DV, leaving, table, T, NS, N, LENGTH, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
    HAS_STATE: tl.constexpr, BULK: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One span; `leaving` takes the adjoint state before each piece. F [H]: the log-decay a token (GATED). BULK: q,
    k, v and do are descriptors; dk and dv never are, since their staging would not fit beside three chunks."""
    s = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, _, first, _ = span(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    t = tl.arange(0, C)
    q_, rq, cq = rows(Q, b, start, h, T, HK, H, K, BULK)
    k_, _, _ = rows(K_, b, start, h, T, HK, H, K, BULK)
    v_, rv, cv = rows(V_, b, start, h, T, H, H, V, BULK)
    do_, _, _ = rows(DO, b, start, h, T, H, H, V, BULK)
    dk_, _, _ = rows(DK, b, start, h, T, H, H, K, False)
    dv_, _, _ = rows(DV, b, start, h, T, H, H, V, False)
    own = ((b.to(tl.int64) * N + piece) * H + h) * (K * V)
    inside = (e < V)[:, None] & (d < K)[None, :]
    at = d[None, :] * V + e[:, None]
    R = tl.zeros([BV, BK], tl.float32)
    if HAS_STATE:
        row = (b.to(tl.int64) * NS + s) * H + h
        R = tl.load(entering + row * (K * V) + at, inside, other=0.0)
    n = (left + C - 1) // C
    sees = t[:, None] <= t[None, :]  # [j, i]
    one = tl.where(left > 0, 1.0, 0.0)  # a factor the compiler does not know, or it would chain the two products
    if GATED:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
        gap = (t[None, :] - t[:, None]).to(tl.float32) * rate
        decay = tl.exp2(tl.where(sees, gap, float("-inf")))
    for m in range(n):
        c = (n - 1 - m) * C
        k = take(K_, k_, rq, cq, c, t, left, d, 0, HK * K, K, BULK)
        q = take(Q, q_, rq, cq, c, t, left, d, 0, HK * K, K, BULK)
        v = take(V_, v_, rv, cv, c, t, left, e, 0, H * V, V, BULK)
        do = take(DO, do_, rv, cv, c, t, left, e, 0, H * V, V, BULK)
        P = tl.dot(k, tl.trans(q), input_precision=PREC)
        if GATED:
            keep, reach, gc = constant(rate, scale, tl.minimum(left - c, C), t)
            P *= decay
        else:
            P = tl.where(sees, P, 0.0)
        state = R.to(k.dtype)
        dv = tl.dot(k, tl.trans(state), input_precision=PREC)
        dv *= reach[:, None] if GATED else one
        dv += tl.dot(P.to(k.dtype), do, input_precision=PREC) * scale
        put(dv_ + c * (H * V), dv, t, left - c, e, H * V, V)
        A = tl.dot(v, tl.trans(do), input_precision=PREC)
        A = A * decay if GATED else tl.where(sees, A, 0.0)
        dow = tl.trans(do).to(tl.float32)
        dow = (dow * (keep[None, :] if GATED else scale)).to(k.dtype)
        dk = tl.dot(v, state, input_precision=PREC)
        dk *= reach[:, None] if GATED else one
        dk += tl.dot(A.to(k.dtype), q, input_precision=PREC) * scale
        if GATED:
            R *= tl.exp2(gc)
        R = tl.dot(dow, q, R, input_precision=PREC)
        put(dk_ + c * (H * K), dk, t, left - c, d, H * K, K)
    if first:
        tl.store(leaving + own + at, R, inside)


def write_gradients(
    plan: SpanPlan, gates: Gates, inputs: Inputs, do: Tensor, adjoint: Tensor | None, dS0: Tensor
) -> tuple[Tensor, Tensor]:
    """dk and dv, without a decay or with one that is constant, from the gradients of the states after the spans (None:
    zero); `dS0` takes those of the states that enter the pieces."""
    how, spans, (_, T, _, HK, K, V) = plan.pick(WRITES), plan.spans, plan.sizes
    wk, wv, dk, dv = columns(K), columns(V), plan.tokens(K), plan.tokens(V)
    launch(
        writes_kernel, (spans.count, plan.rows),
        *filled(
            tiles(plan, inputs.q, wk), tiles(plan, inputs.k, wk), tiles(plan, inputs.v, wv), tiles(plan, do, wv),
            gates.read, adjoint, dk, dv, dS0,
        ),
        spans.table, T, spans.count, spans.pieces, spans.length, plan.scale, HK=HK, K=K, V=V, BK=wk,
        BV=wv, GATED=gates.present, HAS_STATE=adjoint is not None, **shared_constants(plan), **how.options,
    )  # fmt: skip
    return dk, dv
