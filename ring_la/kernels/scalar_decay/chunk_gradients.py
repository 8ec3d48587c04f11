"""The gradients of additive writes under a scalar decay, all chunks at once.

With S the state before a chunk, R the gradient of the one after it, and the factors of `attend`:

    dq_i = c e^{G_i} S do_i + c Σ_{j≤i} e^{G_i−G_j} (do_i·v_j) k_j            b_i: q_i · the first term
    dk_j = e^{G_C−G_j} R v_j + c Σ_{i≥j} e^{G_i−G_j} (v_j·do_i) q_i            w_j: k_j · the first term
    dv_j = e^{G_C−G_j} Rᵀk_j + c Σ_{i≥j} e^{G_i−G_j} (k_j·q_i) do_i
    dg_t = e^{G_C} <S, R> + Σ_{i≥t} b_i + Σ_{j<t} w_j + Σ_{j<t≤i} x_ij,       x_ij = c e^{G_i−G_j} (q_i·k_j) (do_i·v_j)

dg_t is what the pairs of tokens give that t separates, each counted once: around the chunk, from before it, to after
it, inside it. Nothing in it cancels but Σ_{s≥t} (Σ_j x_sj − Σ_i x_is), whose terms are the same fp32 numbers, and no
error goes further than a chunk. (The difference of q·dq and k·dk, summed over tokens, is the same in exact arithmetic.)
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.runtime.zeros import zeros
from ring_la.kernels.scalar_decay.operands import Gates, columns, constant
from ring_la.kernels.spans import table
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import ADDITIVE_GRADIENT
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit(do_not_specialize=SIZES)
def additive_gradient_kernel(
    q, k, v, do, F, SKIPPED, states, adjoints, dq_, dk_, dv_, dg_, db_, da_, table, T, NC, scale, H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    STATIC: tl.constexpr, STRONG: tl.constexpr, SKIP: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One chunk, BK key channels a step. `states` and `adjoints` [B, NC, H, K, V] are S and R of every chunk; dg
    [B, T, H]. F and STATIC as for `attend.attend_kernel`. STRONG: v comes times β, whose gradient is db [B, T, H];
    SKIP: and times SKIPPED [H], whose gradient by token is da [B, T, H], it is added to the output."""
    s = tl.program_id(0) // H  # the heads of a chunk side by side, as they lie in memory
    h = tl.program_id(0) % H
    b = tl.program_id(1)
    start, end, _, _, _, _ = span(table, s, T, C, C, VARLEN)
    n = end - start
    if n <= 0:
        return
    t = tl.arange(0, C)
    e = tl.arange(0, BV)
    chunk = (b.to(tl.int64) * NC + s) * H + h
    if STATIC:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
        keep, reach, gc = constant(rate, scale, n, t)
        g = rate * t  # only differences of it are used
    else:
        f = F + chunk * (4 * C)
        g = tl.load(f + t)
        keep = tl.load(f + C + t)
        reach = tl.load(f + 2 * C + t)
        gc = tl.load(f + C - 1)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    dq_ = head(dq_, b, start, h, T, H, H, K)
    dk_ = head(dk_, b, start, h, T, H, H, K)
    z = tile(head(v, b, start, h, T, H, H, V), t, n, e, H * V, V)
    w = tile(head(do, b, start, h, T, H, H, V), t, n, e, H * V, V)
    seen = t[:, None] >= t[None, :]  # [i, j]
    sees = t[:, None] <= t[None, :]  # [j, i]
    A = tl.dot(w, tl.trans(z), input_precision=PREC)
    if SKIP:
        da = tl.sum(tl.where(t[:, None] == t[None, :], A, 0.0), 1)
        tl.store(da_ + (b.to(tl.int64) * T + start + t) * H + h, da, t < n)
    A *= tl.exp2(tl.where(seen, g[:, None] - g[None, :], float("-inf"))) * scale
    if STRONG:
        step = tl.load(f + 3 * C + t)
        A *= step[None, :]
    A = A.to(z.dtype)
    B = tl.dot(z, tl.trans(w), input_precision=PREC)
    B *= tl.exp2(tl.where(sees, g[None, :] - g[:, None], float("-inf"))) * scale
    if STRONG:
        B *= step[:, None]
    B = B.to(z.dtype)
    one = tl.where(n > 0, 1.0, 0.0)  # what the compiler does not know, or it would chain two products …
    nought = tl.where(n > 0, 0.0, 1.0)  # … or hold one, rather than make it again
    P = tl.zeros([C, C], tl.float32)  # k·q, [j, i]
    dv = tl.zeros([C, BV], tl.float32)
    reads = tl.zeros([C], tl.float32)
    writes = tl.zeros([C], tl.float32)
    written = tl.zeros([C], tl.float32)  # before factors
    through = tl.zeros([BK], tl.float32)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        x = tile(q_, t, n, d, HK * K, K)
        y = tile(k_, t, n, d, HK * K, K)
        R = tile(adjoints + chunk * (K * V), d, K, e, V, V)
        S = tile(states + chunk * (K * V), d, K, e, V, V)
        dk = tl.dot(z, tl.trans(R), input_precision=PREC)
        dq = tl.dot(w, tl.trans(S), input_precision=PREC)
        dk_inside = tl.dot(B, x, input_precision=PREC)
        dq_inside = tl.dot(A, y, input_precision=PREC)
        P = tl.dot(y, tl.trans(x), P, input_precision=PREC)
        dv = tl.dot(y, R, dv, input_precision=PREC)
        through += tl.sum(S.to(tl.float32) * R.to(tl.float32), 1)
        if STRONG:
            written += tl.sum(dk * y.to(tl.float32), 1)
        dk *= reach[:, None]
        writes += tl.sum(dk * y.to(tl.float32), 1)
        put(dk_, dk + dk_inside * one, t, n, d, H * K, K)
        dq *= keep[:, None]
        reads += tl.sum(dq * x.to(tl.float32), 1)
        put(dq_, dq + dq_inside * one, t, n, d, H * K, K)
    P *= tl.exp2(tl.where(sees, g[None, :] - g[:, None], float("-inf"))) * scale
    dv *= reach[:, None]
    dv += tl.dot(((P * step[:, None]) if STRONG else P).to(z.dtype), w, input_precision=PREC)
    if SKIP:
        dv += w.to(tl.float32) * tl.load(SKIPPED + h).to(tl.float32)
    put(head(dv_, b, start, h, T, H, H, V), dv, t, n, e, H * V, V)
    pairs = P * tl.dot(z, tl.trans(w), tl.zeros([C, C], tl.float32) + nought, input_precision=PREC)
    if STRONG:
        db = tl.sum(pairs, 1) + written * tl.exp2(gc - g)
        tl.store(db_ + (b.to(tl.int64) * T + start + t) * H + h, db, t < n)
        pairs *= step[:, None]
    pairs = tl.where(t[:, None] < t[None, :], pairs, 0.0)
    reads += tl.sum(pairs, 0) - tl.sum(pairs, 1)
    dg = tl.cumsum(reads, 0, reverse=True) + tl.cumsum(writes, 0) - writes + tl.sum(through, 0) * tl.exp2(gc)
    tl.store(dg_ + (b.to(tl.int64) * T + start + t) * H + h, dg, t < n)


def chunk_gradients(
    plan: SpanPlan, gates: Gates, inputs: Inputs, do: Tensor, states: Tensor, adjoints: Tensor
) -> Inputs:
    """All gradients of all chunks at once, from the states before the chunks and the gradients of those after them; dq
    and dk by head, or, where a program takes two, summed over those that share a q and k."""
    how, (B, T, H, HK, K, V) = plan.pick(ADDITIVE_GRADIENT), plan.sizes
    dv, dg = plan.tokens(V), plan.new(B, T, H)
    db = plan.new(B, T, H) if gates.strong else None
    da = None if gates.skip is None else plan.new(B, T, H)
    paired = not gates.constant and by_pairs(plan)
    dq, dk = (plan.new(B, T, H // 2 if paired else H, K, dtype=plan.dtype) for _ in range(2))
    read, rest = (*inputs.qkv, do, gates.read), (plan.chunks.table, T, plan.chunk_count, plan.scale)
    tensors = (*read, gates.skip, states, adjoints, dq, dk, dv, dg, db, da)
    args = (*filled(*tensors), *rest)
    strong: dict[str, Any] = dict(STRONG=gates.strong, SKIP=gates.skip is not None)
    shape: dict[str, Any] = dict(H=H, HK=HK, K=K, V=V, C=plan.chunk, VARLEN=plan.packed)
    if paired:
        from ring_la.kernels.scalar_decay.paired_gradients_hopper import paired_gradient_kernel

        pairs = H // 2 // HK
        ended = zeros(B * plan.chunk_count * HK, dq.device) if pairs > 1 else None
        sums = [plan.new(B, T, HK, K, dtype=plan.dtype) if pairs > 1 else x for x in (dq, dk)]
        launch(
            paired_gradient_kernel, (plan.chunk_count * (H // 2), B), *filled(*tensors, *sums, ended), *rest, H=H,
            HK=HK, C=plan.chunk, VARLEN=plan.packed, **strong, PAIRS=pairs, num_warps=4,
        )  # fmt: skip
        dq, dk = sums
    elif not (gates.constant or gates.strong) and plan.gluon:
        from ring_la.kernels.scalar_decay.chunk_gradients_hopper import additive_gradient_hopper_kernel

        args = (*read, states, adjoints, dq, dk, dv, dg, *rest)
        launch(additive_gradient_hopper_kernel, (plan.chunk_count * H, B), *args, **shape, num_warps=4)
    else:
        launch(
            additive_gradient_kernel, (plan.chunk_count * H, B), *args, **shape, BK=how.block, BV=columns(V),
            STATIC=gates.constant, **strong, PREC=plan.precision, **how.options,
        )  # fmt: skip
    return Inputs(dq, dk, dv, dg, db, da)


def by_pairs(plan: SpanPlan) -> bool:
    """Whether a program takes two heads, which then share a q and k, and leaves dq and dk of both."""
    _, _, H, HK, K, V = plan.sizes
    return table.PAIRED and plan.gluon and (K, V) == (128, 64) and H // HK % 2 == 0
