"""What is done side by side when the walks are: outputs, and gradients of what reads and of what writes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import node_at, put, rows_of, state_at, tile
from ring_la.kernels.momentum.device import (
    SIZES,
    chunk,
    kept,
    kept_turned,
    last,
    number,
    rates_at,
    sum_from,
)
from ring_la.kernels.momentum.launches import ChunksCall, Given, Kept
from ring_la.kernels.runtime.launch import launch


@triton.jit(do_not_specialize=SIZES)
def outputs_kernel(
    q, k, g, mu, beta, eta, table, rates, W, Ss, Ms, O, T, R, scale, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o of one chunk."""
    row, b, h, token, live = chunk(table, T, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    gate = number(g, b, token, h, T, live, H)
    cm = tl.cumsum(number(mu, b, token, h, T, live, H), 0)
    rate = number(beta, b, token, h, T, live, H)
    step = number(eta, b, token, h, T, live, H)
    steps = kept(gate, tl.cumsum(gate, 0), t, False) * rate[None, :]
    gamma = tl.dot(steps, kept(cm, cm, t, False), input_precision=PREC)
    keys = tile(rows_of(k, b, token, h, T, H, H, K), live, d, K)
    asks = tile(rows_of(q, b, token, h, T, H, H, K), live, d, K)
    read = tl.dot(asks, tl.trans(keys), input_precision=PREC) * gamma * -step[None, :]
    w = tile(rows_of(W, b, token, h, T, H, H, V), live, e, V)
    o = tl.dot(read.to(keys.dtype), w, input_precision=PREC)
    at = rates_at(rates, b, row, h, R, H, C) + t
    wide = asks.to(tl.float32)
    S = node_at(Ss, b, row, h, R, d, e, H, K, V)
    o = tl.dot((wide * tl.load(at + 4 * C)[:, None]).to(keys.dtype), S, o, input_precision=PREC)
    M = node_at(Ms, b, row, h, R, d, e, H, K, V)
    o = tl.dot((wide * -tl.load(at + 5 * C)[:, None]).to(keys.dtype), M, o, input_precision=PREC)
    put(rows_of(O, b, token, h, T, H, H, V), o * scale, live, e, V)


@triton.jit(do_not_specialize=SIZES)
def reads_kernel(
    x, k, G, W, g, mu, beta, eta, table, rates, Ss, Ms, DX, gates, T, R, scale, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EARLIER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of what reads S after its token (EARLIER: before it), and what g, mu and beta get from it, of the
    gradient G of what is read, over the scale."""
    row, b, h, token, live = chunk(table, T, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    step = number(eta, b, token, h, T, live, H)
    at = rates_at(rates, b, row, h, R, H, C) + t + (2 * C if EARLIER else 4 * C)
    a = tl.load(at)
    asks = tile(rows_of(x, b, token, h, T, H, H, K), live, d, K)
    grad = tile(rows_of(G, b, token, h, T, H, H, V), live, e, V)
    wide = asks.to(tl.float32)
    S = node_at(Ss, b, row, h, R, d, e, H, K, V)
    y = tl.dot(grad, tl.trans(S), input_precision=PREC)
    da = tl.sum(wide * y, 1) * scale
    dx = y * a[:, None]
    M = node_at(Ms, b, row, h, R, d, e, H, K, V)
    y = tl.dot(grad, tl.trans(M), input_precision=PREC)
    db = tl.sum(wide * y, 1) * -scale
    dx -= y * tl.load(at + C)[:, None]
    gate = number(g, b, token, h, T, live, H)
    c = tl.cumsum(gate, 0)
    cm = tl.cumsum(number(mu, b, token, h, T, live, H), 0)
    rate = number(beta, b, token, h, T, live, H)
    D = kept(cm, cm, t, False)
    A = kept(gate, c, t, EARLIER)
    gamma = tl.dot(A * rate[None, :], D, input_precision=PREC)
    keys = tile(rows_of(k, b, token, h, T, H, H, K), live, d, K)
    w = tile(rows_of(W, b, token, h, T, H, H, V), live, e, V)
    met = tl.dot(grad, tl.trans(w), input_precision=PREC) * step[None, :]
    dx -= tl.dot((met * gamma).to(keys.dtype), keys, input_precision=PREC)
    put(rows_of(DX, b, token, h, T, H, H, K), dx * scale, live, d, K)
    seen = t[:, None] > t[None, :] if EARLIER else t[:, None] >= t[None, :]
    dgamma = tl.where(seen, tl.dot(asks, tl.trans(keys), input_precision=PREC) * met * -scale, 0.0)
    m = tl.exp(cm)
    dsteps = tl.dot(dgamma, kept_turned(cm, cm, t, False), input_precision=PREC) + db[:, None] * m[None, :]
    dsteps *= A
    of_rate = tl.sum(dsteps, 0)
    behind = tl.sum(dsteps * rate[None, :], 1) + da * a
    turned = kept_turned(gate, c, t, EARLIER) * rate[:, None]
    held = tl.dot(turned, dgamma, input_precision=PREC) * D
    of_m = tl.sum(turned * db[None, :], 1) * m + tl.sum(held, 1) - tl.sum(held, 0)
    dg = sum_from(behind - of_rate * rate, t)
    if EARLIER:
        dg -= behind
    size = (tl.num_programs(1) // H).to(tl.int64) * T * H
    tl.store(rows_of(gates, b, token, h, T, H, H, 1), dg, live)
    tl.store(rows_of(gates + size, b, token, h, T, H, H, 1), sum_from(of_m, t), live)
    tl.store(rows_of(gates + 2 * size, b, token, h, T, H, H, 1), of_rate, live)


@triton.jit
def along(x, y, b, row, h, R, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Σ of the products of two states of a chunk."""
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    left = node_at(x, b, row, h, R, d, e, H, K, V).to(tl.float32)
    return tl.sum(tl.sum(left * node_at(y, b, row, h, R, d, e, H, K, V).to(tl.float32), 1), 0)


@triton.jit(do_not_specialize=SIZES)
def ends_kernel(
    Ss, Ms, dSs, dMs, out, R, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """What the a, b and m of one chunk get."""
    row = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    into = state_at(out, b, row, h, R, H, 4)
    tl.store(into, along(Ss, dSs, b, row, h, R, H, K, V, BK, BV))
    tl.store(into + 1, -along(Ms, dSs, b, row, h, R, H, K, V, BK, BV))
    tl.store(into + 2, along(Ms, dMs, b, row, h, R, H, K, V, BK, BV))


@triton.jit(do_not_specialize=SIZES)
def writes_kernel(
    q, k, p, do, DV, W, g, mu, beta, eta, table, ends, dSs, dMs, DK, gates, T, R, scale, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk of one chunk, and what g, mu, beta and eta get from it."""
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
    turned = kept_turned(cm, cm, t, False)
    w = tile(rows_of(W, b, token, h, T, H, H, V), live, e, V)
    keys = tile(rows_of(k, b, token, h, T, H, H, K), live, d, K)
    wide = keys.to(tl.float32)
    ended = tl.exp(last(c, t, C) - c)
    to_S = tl.sum((ended * rate)[:, None] * D, 0)
    y = tl.dot(w, tl.trans(node_at(dSs, b, row, h, R, d, e, H, K, V)), input_precision=PREC)
    dS = tl.sum(wide * y, 1) * -step
    dk = y * -to_S[:, None]
    to_M = tl.exp(last(cm, t, C) - cm)
    y = tl.dot(w, tl.trans(node_at(dMs, b, row, h, R, d, e, H, K, V)), input_precision=PREC)
    dM = tl.sum(wide * y, 1) * step * to_M
    dk += y * to_M[:, None]
    met = tl.dot(w, tl.trans(tile(rows_of(do, b, token, h, T, H, H, V), live, e, V)), input_precision=PREC)
    met *= tl.dot(turned, kept_turned(gate, c, t, False) * rate[:, None], input_precision=PREC) * -scale
    asks = tile(rows_of(q, b, token, h, T, H, H, K), live, d, K)
    dk += tl.dot(met.to(keys.dtype), asks, input_precision=PREC)
    met = tl.dot(w, tl.trans(tile(rows_of(DV, b, token, h, T, H, H, V), live, e, V)), input_precision=PREC)
    met *= tl.dot(turned, kept_turned(gate, c, t, True) * rate[:, None], input_precision=PREC)
    asks = tile(rows_of(p, b, token, h, T, H, H, K), live, d, K)
    dk += tl.dot(met.to(keys.dtype), asks, input_precision=PREC)
    put(rows_of(DK, b, token, h, T, H, H, K), dk * step[:, None], live, d, K)
    # the last row of Γ, and D's
    at = state_at(ends, b, row, h, R, H, 4)
    da = tl.load(at)
    db = tl.load(at + 1)
    m = tl.exp(cm)
    dended = (tl.sum(D * dS[None, :], 1) + db * m) * ended
    held = D * (ended * rate)[:, None] * dS[None, :]
    of_m = tl.sum(held, 1) - tl.sum(held, 0) + ended * rate * db * m - dM
    of_m += tl.where(t == C - 1, tl.sum(dM, 0) + tl.load(at + 2) * last(m, t, C), 0.0)
    of_g = -dended * rate
    of_g += tl.where(t == C - 1, tl.sum(dended * rate, 0) + da * last(tl.exp(c), t, C), 0.0)
    size = (tl.num_programs(1) // H).to(tl.int64) * T * H
    tl.store(rows_of(gates, b, token, h, T, H, H, 1), sum_from(of_g, t), live)
    tl.store(rows_of(gates + size, b, token, h, T, H, H, 1), sum_from(of_m, t), live)
    tl.store(rows_of(gates + 2 * size, b, token, h, T, H, H, 1), dended, live)
    tl.store(rows_of(gates + 3 * size, b, token, h, T, H, H, 1), tl.sum(dk * wide, 1), live)


def outputs(call: ChunksCall, x: Given, kept: Kept) -> Tensor:
    """o ``[B, T, H, V]``."""
    o = call.tokens(call.V)
    launch(
        outputs_kernel, (call.R, call.B * call.H), x.q, x.k, x.g, x.mu, x.beta, x.eta, call.table, kept.rates, kept.w,
        kept.S, kept.M, o, call.T, call.R, call.scale, **call.chunks, num_stages=1,
    )  # fmt: skip
    return o


def gradients(
    call: ChunksCall, x: Given, kept: Kept, do: Tensor, dv: Tensor, behind: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """dq, dk, dp, and in fp32 those of g, mu, beta and eta. behind: gradients of S and M behind chunks."""
    dq, dk, dp = (call.tokens(call.K) for _ in range(3))
    grid, how = (call.R, call.B * call.H), dict(call.chunks, num_stages=1)
    gates = dq.new_zeros(3, 4, call.B, call.T, call.H, dtype=call.wide)
    for n, (asks, grad, into, scale) in enumerate(((x.q, do, dq, call.scale), (x.p, dv, dp, -1.0))):
        launch(
            reads_kernel, grid, asks, x.k, grad, kept.w, x.g, x.mu, x.beta, x.eta, call.table, kept.rates, kept.S,
            kept.M, into, gates[n], call.T, call.R, scale, EARLIER=bool(n), **how,
        )  # fmt: skip
    ends = call.nodes(4, dtype=call.wide)
    own = {n: how[n] for n in ("H", "K", "V", "BK", "BV", "num_warps")}
    launch(ends_kernel, grid, kept.S, kept.M, *behind, ends, call.R, **own)
    launch(
        writes_kernel, grid, x.q, x.k, x.p, do, dv, kept.w, x.g, x.mu, x.beta, x.eta, call.table, ends, *behind, dk,
        gates[2], call.T, call.R, call.scale, **how,
    )  # fmt: skip
    return [dq, dk, dp, *gates.sum(0)]
