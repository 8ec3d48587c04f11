"""Outputs: a program has one chunk, whose tokens see each other, and the nodes that it reads.

o_t = scale (Σ_{s ≤ t in the chunk} λ_t[ℓ(t, s)] e^{c_t − c_s} (q_tᵀ k_s) v_s + Σ_i λ_t[ℓ_i] e^{c_t − c_end} F_iᵀ q_t)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import SIZES, chunk_row, level_weights, node_at, power, put, tile
from ring_la.kernels.fenwick.launches import LevelsCall
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head


@triton.jit(do_not_specialize=SIZES)
def outputs_kernel(
    Q, K_, V_, c, lam, table, states, O, T, R, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, C: tl.constexpr, LOWER: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One chunk, BV value channels."""
    row = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    place, start, end, m, first, _ = chunk_row(table, row)
    d = tl.arange(0, BK)
    e = tl.program_id(2) * BV + tl.arange(0, BV)
    t = tl.arange(0, C)
    token = place + t
    live = (token >= start) & (token < end)
    q = tile(head(Q, b, token, h, T, HK, H, K), live, d, K)
    k = tile(head(K_, b, token, h, T, HK, H, K), live, d, K)
    v = tile(head(V_, b, token, h, T, H, H, V), live, e, V)
    ends = c + (b.to(tl.int64) * H + h) * T
    now = tl.load(ends + token, live, other=0.0)
    here = tl.where(live, now - tl.load(ends + tl.maximum(place, start)), 0.0).to(tl.float32)
    weights = head(lam, b, token, h, T, H, H, L)
    sees = (t[:, None] >= t[None, :]) & live[:, None]
    P = tl.dot(q, tl.trans(k), input_precision=PREC)
    P *= power(tl.where(sees, here[:, None] - here[None, :], float("-inf")))
    P *= level_weights(weights, live, t, L, LOWER, True)
    o = tl.dot(P.to(v.dtype), v, input_precision=PREC)
    i = m
    while i > first:
        low = i & -i
        node = row - (m - i)
        S = node_at(states, b, node, h, R, d, e, H, K, V)
        level = LOWER + tl.load(table + node * 8 + 6)
        decay = power(tl.where(live, now - tl.load(ends + place - (m - i) * C - 1), float("-inf")))
        decay *= tl.load(weights + level, live, other=0.0).to(tl.float32)
        o += tl.dot(q, S, input_precision=PREC) * decay[:, None]
        i -= low
    put(head(O, b, token, h, T, H, H, V), o * scale, live, e, V)


def outputs(call: LevelsCall, q: Tensor, k: Tensor, v: Tensor, c: Tensor, lam: Tensor, states: Tensor) -> Tensor:
    """o ``[B, T, H, V]`` in v's dtype, from the nodes' states."""
    how, o = call.reads, v.new_empty(v.shape)
    launch(
        outputs_kernel, (call.R, call.B * call.H, -(-call.V // how.block)),
        q, k, v, c, lam, call.table, states, o, call.T, call.R, call.scale, HK=q.shape[2], **call.constants,
        BV=how.block, **how.options,
    )  # fmt: skip
    return o
