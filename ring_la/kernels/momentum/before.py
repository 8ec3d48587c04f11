"""What the walks read of each chunk, a program each: solutions and weights, forward and back."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import put, rows_of, state_at, tile
from ring_la.kernels.momentum.device import SIZES, chunk, kept, kept_turned, last, number, rates_at
from ring_la.kernels.momentum.launches import ROWS, ChunksCall, Given
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.wy.inverse import invert


@triton.jit(do_not_specialize=SIZES)
def forwards_kernel(
    k, v, p, g, mu, beta, eta, table, inverse, rates, P1, P2, U, T, R, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """T less the identity, T a′p, −T b′p and −T v, and the numbers of a chunk."""
    row, b, h, token, live = chunk(table, T, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    gate = number(g, b, token, h, T, live, H)
    c = tl.cumsum(gate, 0)
    cm = tl.cumsum(number(mu, b, token, h, T, live, H), 0)
    rate = number(beta, b, token, h, T, live, H)
    step = number(eta, b, token, h, T, live, H)
    D = kept(cm, cm, t, False)
    m = tl.exp(cm)
    steps = kept(gate, c, t, True) * rate[None, :]
    ended = tl.exp(last(c, t, C) - c) * rate
    m_end = last(cm, t, C)
    a_own = tl.exp(c - gate)
    b_own = tl.sum(steps * m[None, :], 1)
    into = rates_at(rates, b, row, h, R, H, C) + t
    tl.store(into, tl.sum(ended[:, None] * D, 0) * step)
    tl.store(into + C, tl.exp(m_end - cm) * step)
    tl.store(into + 2 * C, a_own)
    tl.store(into + 3 * C, b_own)
    tl.store(into + 4 * C, tl.exp(c))
    tl.store(into + 5 * C, tl.sum(kept(gate, c, t, False) * (rate * m)[None, :], 1))
    whole = tl.where(t == 0, tl.exp(last(c, t, C)), tl.where(t == 1, tl.sum(ended * m, 0), tl.exp(m_end)))
    tl.store(into + 6 * C, whole)
    keys = tile(rows_of(k, b, token, h, T, H, H, K), live, d, K)
    asks = tile(rows_of(p, b, token, h, T, H, H, K), live, d, K)
    L = tl.dot(asks, tl.trans(keys), input_precision=PREC) * tl.dot(steps, D, input_precision=PREC) * step[None, :]
    X = invert(L, C, PREC).to(keys.dtype)
    tl.store(state_at(inverse, b, row, h, R, H, C * C) + t[:, None] * C + t[None, :], X)
    wide = asks.to(tl.float32)
    y = wide * a_own[:, None]
    put(rows_of(P1, b, token, h, T, H, H, K), y + tl.dot(X, y.to(keys.dtype), input_precision=PREC), live, d, K)
    y = wide * -b_own[:, None]
    put(rows_of(P2, b, token, h, T, H, H, K), y + tl.dot(X, y.to(keys.dtype), input_precision=PREC), live, d, K)
    x = tile(rows_of(v, b, token, h, T, H, H, V), live, e, V)
    u = x.to(tl.float32) + tl.dot(X, x, input_precision=PREC)
    put(rows_of(U, b, token, h, T, H, H, V), -u, live, e, V)


@triton.jit(do_not_specialize=SIZES)
def backwards_kernel(
    q, k, do, g, mu, beta, eta, table, inverse, rates, E1, E2, DY, T, R, scale, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What dy is of the gradients of S and M behind a chunk, and of do."""
    row, b, h, token, live = chunk(table, T, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    gate = number(g, b, token, h, T, live, H)
    cm = tl.cumsum(number(mu, b, token, h, T, live, H), 0)
    rate = number(beta, b, token, h, T, live, H)
    step = number(eta, b, token, h, T, live, H) * scale
    turned = kept_turned(gate, tl.cumsum(gate, 0), t, False) * rate[:, None]
    gamma = tl.dot(kept_turned(cm, cm, t, False), turned, input_precision=PREC)
    keys = tile(rows_of(k, b, token, h, T, H, H, K), live, d, K)
    asks = tile(rows_of(q, b, token, h, T, H, H, K), live, d, K)
    read = tl.dot(keys, tl.trans(asks), input_precision=PREC) * gamma * step[:, None]
    grad = tile(rows_of(do, b, token, h, T, H, H, V), live, e, V)
    X = tl.load(state_at(inverse, b, row, h, R, H, C * C) + t[None, :] * C + t[:, None])
    y = -tl.dot(read.to(keys.dtype), grad, input_precision=PREC)
    y += tl.dot(X, y.to(keys.dtype), input_precision=PREC)
    put(rows_of(DY, b, token, h, T, H, H, V), y, live, e, V)
    at = rates_at(rates, b, row, h, R, H, C) + t
    wide = keys.to(tl.float32)
    y = wide * -tl.load(at)[:, None]
    put(rows_of(E1, b, token, h, T, H, H, K), y + tl.dot(X, y.to(keys.dtype), input_precision=PREC), live, d, K)
    y = wide * tl.load(at + C)[:, None]
    put(rows_of(E2, b, token, h, T, H, H, K), y + tl.dot(X, y.to(keys.dtype), input_precision=PREC), live, d, K)


def before_forwards(call: ChunksCall, x: Given) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """T less the identity, the chunks' numbers, and what w is: of S, of M, and of nothing."""
    C = call.constants["C"]
    inverse, rates = call.nodes(C, C), call.nodes(ROWS, C, dtype=call.wide)
    parts = call.tokens(call.K), call.tokens(call.K), call.tokens(call.V)
    launch(
        forwards_kernel, (call.R, call.B * call.H), x.k, x.v, x.p, x.g, x.mu, x.beta, x.eta, call.table, inverse,
        rates, *parts, call.T, call.R, **call.chunks, num_stages=1,
    )  # fmt: skip
    return inverse, rates, parts


def before_backwards(
    call: ChunksCall, x: Given, do: Tensor, inverse: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What dy is: of dS, of dM, and of do."""
    parts = call.tokens(call.K), call.tokens(call.K), call.tokens(call.V)
    launch(
        backwards_kernel, (call.R, call.B * call.H), x.q, x.k, do, x.g, x.mu, x.beta, x.eta, call.table, inverse,
        rates, *parts, call.T, call.R, call.scale, **call.chunks, num_stages=1,
    )  # fmt: skip
    return parts
