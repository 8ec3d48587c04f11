"""`chunk_gradients` where several value heads share a key head, as Mamba-2's do: a program takes all heads of a group.

dq and dk of a chunk are sums over the group's heads, so that only the sums reach memory. The same terms as there, but
what a token reads from before its chunk is counted on the other side, q_i · (S do_i) = do_i · (Sᵀq_i), and likewise
what it writes; and e^{G_i} do_i and e^{G_C−G_j} v_j are rounded to the inputs' dtype before they meet the states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.scalar_decay.operands import Gates, columns, constant
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import SHARED_GRADIENT, cdiv
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile


@triton.jit
def _factors(F, h, chunk, n, t, scale, C: tl.constexpr, STATIC: tl.constexpr):
    """(keep, reach, gc, g) of a head's chunk; of g only differences are used."""
    if STATIC:
        rate = tl.load(F + h).to(tl.float32) * 1.4426950408889634
        keep, reach, gc = constant(rate, scale, n, t)
        g = rate * t
    else:
        f = F + chunk * (4 * C)
        g = tl.load(f + t)
        keep = tl.load(f + C + t)
        reach = tl.load(f + 2 * C + t)
        gc = tl.load(f + C - 1)
    return keep, reach, gc, g


@triton.jit(do_not_specialize=SIZES)
def shared_gradient_kernel(
    q, k, v, do, F, states, adjoints, dq_, dk_, dv_, dg_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STATIC: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """A chunk, a key head and 64 of its channels; dq, dk [B, T, HK, K], all else as for `additive_gradient_kernel`.

    PARTS programs, one for 64 channels each, share the heads of a group: of PARTS heads each finds what they add to its
    channels of dq and dk, and of one of them dv and dg. They run side by side, so that what both read comes once.
    """
    part = tl.program_id(0) % PARTS
    s = tl.program_id(0) // PARTS // HK
    hk = tl.program_id(0) // PARTS % HK
    b = tl.program_id(1)
    start, end, _, _, _, _ = span(table, s, T, C, C, VARLEN)
    n = end - start
    if n <= 0:
        return
    GROUP: tl.constexpr = H // HK
    t = tl.arange(0, C)
    c = tl.arange(0, 64)
    d = part * 64 + c
    e = tl.arange(0, BV)
    q_ = head(q, b, start, hk, T, HK, HK, K)
    k_ = head(k, b, start, hk, T, HK, HK, K)
    x = tile(q_, t, n, d, HK * K, K)
    y = tile(k_, t, n, d, HK * K, K)
    seen = t[:, None] >= t[None, :]  # [i, j]
    sees = t[:, None] <= t[None, :]  # [j, i]
    dq = tl.zeros([C, 64], tl.float32)
    dk = tl.zeros([C, 64], tl.float32)
    first = (b.to(tl.int64) * NC + s) * H
    until = hk * GROUP + GROUP
    for i in range(hk * GROUP, until, PARTS):
        for h in range(i, tl.minimum(i + PARTS, until)):
            keep, reach, gc, g = _factors(F, h, first + h, n, t, scale, C, STATIC)
            z = tile(head(v, b, start, h, T, H, H, V), t, n, e, H * V, V)
            w = tile(head(do, b, start, h, T, H, H, V), t, n, e, H * V, V)
            R = tile(adjoints + (first + h) * (K * V), d, K, e, V, V)
            S = tile(states + (first + h) * (K * V), d, K, e, V, V)
            A = tl.dot(w, tl.trans(z), input_precision=PREC)
            A *= tl.exp2(tl.where(seen, g[:, None] - g[None, :], float("-inf"))) * scale
            dq = tl.dot(A.to(y.dtype), y, dq, input_precision=PREC)
            dq = tl.dot((w.to(tl.float32) * keep[:, None]).to(w.dtype), tl.trans(S), dq, input_precision=PREC)
            B = tl.dot(z, tl.trans(w), input_precision=PREC)
            B *= tl.exp2(tl.where(sees, g[None, :] - g[:, None], float("-inf"))) * scale
            dk = tl.dot(B.to(x.dtype), x, dk, input_precision=PREC)
            dk = tl.dot((z.to(tl.float32) * reach[:, None]).to(z.dtype), tl.trans(R), dk, input_precision=PREC)
        h = tl.minimum(i + part, until - 1)  # twice the same where a group has an odd number of heads
        keep, reach, gc, g = _factors(F, h, first + h, n, t, scale, C, STATIC)
        z = tile(head(v, b, start, h, T, H, H, V), t, n, e, H * V, V)
        w = tile(head(do, b, start, h, T, H, H, V), t, n, e, H * V, V)
        P = tl.zeros([C, C], tl.float32)  # k·q, [j, i]
        dv = tl.zeros([C, BV], tl.float32)
        read = tl.zeros([C, BV], tl.float32)
        through = tl.zeros([64], tl.float32)
        for u in range(PARTS):
            xu = tile(q_, t, n, u * 64 + c, HK * K, K)
            yu = tile(k_, t, n, u * 64 + c, HK * K, K)
            R = tile(adjoints + (first + h) * (K * V), u * 64 + c, K, e, V, V)
            S = tile(states + (first + h) * (K * V), u * 64 + c, K, e, V, V)
            P = tl.dot(yu, tl.trans(xu), P, input_precision=PREC)
            dv = tl.dot(yu, R, dv, input_precision=PREC)
            read = tl.dot(xu, S, read, input_precision=PREC)
            through += tl.sum(S.to(tl.float32) * R.to(tl.float32), 1)
        reads = tl.sum(read * w.to(tl.float32), 1) * keep
        writes = tl.sum(dv * z.to(tl.float32), 1) * reach
        P *= tl.exp2(tl.where(sees, g[None, :] - g[:, None], float("-inf"))) * scale
        dv *= reach[:, None]
        dv += tl.dot(P.to(z.dtype), w, input_precision=PREC)
        put(head(dv_, b, start, h, T, H, H, V), dv, t, n, e, H * V, V)
        pairs = P * tl.dot(z, tl.trans(w), input_precision=PREC)
        pairs = tl.where(t[:, None] < t[None, :], pairs, 0.0)
        reads += tl.sum(pairs, 0) - tl.sum(pairs, 1)
        dg = tl.cumsum(reads, 0, reverse=True) + tl.cumsum(writes, 0) - writes + tl.sum(through, 0) * tl.exp2(gc)
        tl.store(dg_ + (b.to(tl.int64) * T + start + t) * H + h, dg, t < n)
    put(head(dq_, b, start, hk, T, HK, HK, K), dq, t, n, d, HK * K, K)
    put(head(dk_, b, start, hk, T, HK, HK, K), dk, t, n, d, HK * K, K)


TOGETHER = False
"""Whether calls take this kernel. It has run in the interpreter alone: set it to have it on a GPU."""


def shares(plan: SpanPlan) -> bool:
    """Whether `shared_gradients` are for a call: two sums of a group's heads and a head's states fit a program."""
    return (
        TOGETHER and plan.sizes.H > plan.sizes.HK and plan.half and max(64, plan.sizes.K) <= 128 and plan.sizes.V <= 64
    )


def shared_gradients(
    plan: SpanPlan, gates: Gates, inputs: Inputs, do: Tensor, states: Tensor, adjoints: Tensor
) -> Inputs:
    """As `chunk_gradients`, but dq and dk are summed over the heads that share a key head, ``[B, T, HK, K]``."""
    how, (B, T, H, HK, K, V) = plan.pick(SHARED_GRADIENT), plan.sizes
    dq, dk = (plan.new(B, T, HK, K, dtype=plan.dtype) for _ in range(2))
    parts, dv, dg = cdiv(K, 64), plan.tokens(V), plan.new(B, T, H)
    launch(
        shared_gradient_kernel, (plan.chunk_count * HK * parts, B), *inputs.qkv, do, gates.read, states, adjoints, dq,
        dk, dv, dg, plan.chunks.table, T, plan.chunk_count, plan.scale, H=H, HK=HK, K=K, V=V, PARTS=parts,
        BV=columns(V), C=plan.chunk, STATIC=gates.constant, PREC=plan.precision, VARLEN=plan.packed, **how.options,
    )  # fmt: skip
    return Inputs(dq, dk, dv, dg)
