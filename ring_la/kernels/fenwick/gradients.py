"""Gradients of a chunk's tokens: of q and λ from the states that it reads, of k and v from the gradients of the nodes
that it is part of; and of g from both.

With x_ts what the pair (t, s) adds to the loss, ``dg_t = Σ x_rs over s < t ≤ r``. Within a chunk that is a sum of
rows less columns; what crosses the end of a chunk is added up node by node, from the far side (`gates_kernel`): sums
over a whole sequence would lose it among much larger numbers that cancel.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import SIZES, chunk_row, level_of, level_weights, node_at, power, put, tile
from ring_la.kernels.fenwick.launches import LevelsCall
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    Q, K_, V_, DO, c, lam, table, states, DQ, dlam, sums, crossing, T, R, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq of one chunk by value head, dλ, and Σ_s x_ts of its tokens and of each node that they read."""
    row = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    place, start, end, m, first, _ = chunk_row(table, row)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    t = tl.arange(0, C)
    token = place + t
    live = (token >= start) & (token < end)
    q = tile(head(Q, b, token, h, T, HK, H, K), live, d, K)
    k = tile(head(K_, b, token, h, T, HK, H, K), live, d, K)
    v = tile(head(V_, b, token, h, T, H, H, V), live, e, V)
    do = tile(head(DO, b, token, h, T, H, H, V), live, e, V)
    ends = c + (b.to(tl.int64) * H + h) * T
    now = tl.load(ends + token, live, other=0.0)
    here = tl.where(live, now - tl.load(ends + tl.maximum(place, start)), 0.0).to(tl.float32)
    weights = head(lam, b, token, h, T, H, H, L)
    into = head(dlam, b, token, h, T, H, H, L)
    sees = (t[:, None] >= t[None, :]) & live[:, None]
    A = tl.dot(do, tl.trans(v), input_precision=PREC)
    A *= power(tl.where(sees, here[:, None] - here[None, :], float("-inf"))) * scale
    x = tl.dot(q, tl.trans(k), input_precision=PREC) * A
    level = level_of(t, LOWER)
    for n in tl.static_range(LOWER):
        if n < L:
            tl.store(into + n, tl.sum(tl.where(level == n, x, 0.0), 1), live)
    each = level_weights(weights, live, t, L, LOWER, True)
    total = tl.sum(tl.where(t[:, None] > t[None, :], x * each, 0.0), 1)
    dq = tl.dot((A * each).to(k.dtype), k, input_precision=PREC)
    wide = q.to(tl.float32)
    i = m
    while i > first:
        low = i & -i
        node = row - (m - i)
        S = node_at(states, b, node, h, R, d, e, H, K, V)
        above = tl.load(table + node * 8 + 6)
        decay = power(tl.where(live, now - tl.load(ends + place - (m - i) * C - 1), float("-inf"))) * scale
        weight = tl.load(weights + LOWER + above, live, other=0.0).to(tl.float32)
        D = tl.dot(do, tl.trans(S), input_precision=PREC)
        found = tl.sum(wide * D, 1) * decay
        tl.store(into + LOWER + above, found, live)
        total += found * weight
        tl.store(crossing + (tl.program_id(1).to(tl.int64) * UPPER + above) * R + row, tl.sum(found * weight, 0))
        dq += D * (decay * weight)[:, None]
        i -= low
    put(head(DQ, b, token, h, T, H, H, K), dq, live, d, K)
    tl.store(sums + (b.to(tl.int64) * H + h) * T + token, total, live)


@triton.jit(do_not_specialize=SIZES)
def writes_kernel(
    Q, K_, V_, DO, c, lam, table, adjoint, DK, DV, sums, crossing, T, R, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk by value head and dv of one chunk, and Σ_t x_ts of its tokens and of each node that they are part of. Squares
    are [s, t] here from the start: nothing that came out of a product is transposed."""
    row = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    place, start, end, m, _, last = chunk_row(table, row)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    t = tl.arange(0, C)
    token = place + t
    live = (token >= start) & (token < end)
    q = tile(head(Q, b, token, h, T, HK, H, K), live, d, K)
    k = tile(head(K_, b, token, h, T, HK, H, K), live, d, K)
    v = tile(head(V_, b, token, h, T, H, H, V), live, e, V)
    do = tile(head(DO, b, token, h, T, H, H, V), live, e, V)
    ends = c + (b.to(tl.int64) * H + h) * T
    now = tl.load(ends + token, live, other=0.0)
    here = tl.where(live, now - tl.load(ends + tl.maximum(place, start)), 0.0).to(tl.float32)
    seen = (t[:, None] <= t[None, :]) & live[:, None] & live[None, :]
    W = power(tl.where(seen, here[None, :] - here[:, None], float("-inf"))) * scale
    W *= level_weights(head(lam, b, token, h, T, H, H, L), live, t, L, LOWER, False)
    P = tl.dot(k, tl.trans(q), input_precision=PREC) * W
    dv = tl.dot(P.to(do.dtype), do, input_precision=PREC)
    A = tl.dot(v, tl.trans(do), input_precision=PREC)
    total = tl.sum(tl.where(t[:, None] < t[None, :], P * A, 0.0), 1)
    dk = tl.dot((A * W).to(q.dtype), q, input_precision=PREC)
    wide = k.to(tl.float32)
    i = m + 1
    while i <= last:
        low = i & -i
        node = row + (i - m)
        G = node_at(adjoint, b, node, h, R, d, e, H, K, V)
        decay = power(tl.where(live, tl.load(ends + place + (i - m) * C - 1) - now, float("-inf")))
        dv += tl.dot(k, G, input_precision=PREC) * decay[:, None]
        D = tl.dot(v, tl.trans(G), input_precision=PREC) * decay[:, None]
        dk += D
        found = tl.sum(wide * D, 1)
        total += found
        above = tl.load(table + node * 8 + 6)
        tl.store(crossing + (tl.program_id(1).to(tl.int64) * UPPER + above) * R + row, tl.sum(found, 0))
        i += low
    put(head(DK, b, token, h, T, H, H, K), dk, live, d, K)
    put(head(DV, b, token, h, T, H, H, V), dv, live, e, V)
    tl.store(sums + (b.to(tl.int64) * H + h) * T + token, total, live)


@triton.jit(do_not_specialize=SIZES)
def gates_kernel(
    read, written, crossing, table, DG, T, R, H: tl.constexpr, C: tl.constexpr, UPPER: tl.constexpr, N: tl.constexpr
):
    """dg of one chunk: what its tokens read less what they write, summed up from its end, and what crosses that."""
    row = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    place, start, end, m, first, last = chunk_row(table, row)
    t = tl.arange(0, C)
    token = place + t
    live = (token >= start) & (token < end)
    at = (b.to(tl.int64) * H + h) * T + token
    x = tl.load(read + at, live, other=0.0) - tl.load(written + at, live, other=0.0)
    behind = tl.sum(x, 0) - tl.cumsum(x, 0) + x
    n = tl.arange(0, N)
    over = tl.zeros([N], tl.float32)
    for above in range(UPPER):
        size = 1 << above
        block = ((m + 1) >> (above + 1)) << (above + 1)
        node = block + size
        writing = m < node  # else it is what later chunks read
        begin = tl.where(writing, tl.maximum(block, first), m + 1)
        stop = tl.where(writing, m + 1, tl.minimum(block + 2 * size, last + 1))
        if (m + 1 > block) & (node > first) & (node <= last):
            found = crossing + (tl.program_id(1).to(tl.int64) * UPPER + above) * R + row - m
            for j in range(begin, stop, N):
                over += tl.load(found + j + n, j + n < stop, other=0.0)
    tl.store(DG + (b.to(tl.int64) * T + token) * H + h, behind + tl.sum(over, 0), live)


def gradients(
    call: LevelsCall, tokens: Sequence[Tensor], c: Tensor, lam: Tensor, states: Tensor, adjoint: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq and dk by value head ``[B, T, H, K]``, dv, dg and dλ, the last two in fp32. tokens: q, k, v and do."""
    q, k, v, do = tokens
    B, T, H, K = call.B, call.T, call.H, call.K
    narrow = q.dtype if q.shape[2] == H else call.wide  # heads that share a key are added up
    dq, dk = (q.new_empty(B, T, H, K, dtype=narrow) for _ in range(2))
    dv, dlam = v.new_empty(v.shape), c.new_zeros(lam.shape, dtype=call.wide)
    read, written = (c.new_empty(c.shape, dtype=call.wide) for _ in range(2))
    crossing = c.new_zeros(B * H, max(1, call.upper), call.R, dtype=call.wide)
    sizes, grid = (call.T, call.R, call.scale), (call.R, B * H)
    given, how = (q, k, v, do, c, lam, call.table), call.backward
    more = dict(HK=q.shape[2], **call.constants, BV=how.block, UPPER=crossing.shape[1], **how.options)
    launch(queries_kernel, grid, *given, states, dq, dlam, read, crossing, *sizes, **more)
    launch(writes_kernel, grid, *given, adjoint, dk, dv, written, crossing, *sizes, **more)
    dg = c.new_empty(B, T, H, dtype=call.wide)
    launch(
        gates_kernel, grid, read, written, crossing, call.table, dg, T, call.R, H=H, C=call.chunk,
        UPPER=crossing.shape[1], N=128, num_warps=2,
    )  # fmt: skip
    return dq, dk, dv, dg, dlam
