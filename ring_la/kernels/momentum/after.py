"""Outputs, side by side when the walk is done."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import node_at, put, rows_of, tile
from ring_la.kernels.momentum.device import SIZES, chunk, kept, number, rates_at
from ring_la.kernels.momentum.launches import ChunksCall, Given, KeptMomentum
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


def outputs(call: ChunksCall, x: Given, kept: KeptMomentum) -> Tensor:
    """o ``[B, T, H, V]``."""
    o = call.tokens(call.V)
    launch(
        outputs_kernel, (call.R, call.B * call.H), x.q, x.k, x.g, x.mu, x.beta, x.eta, call.table, kept.rates, kept.w,
        kept.S, kept.M, o, call.T, call.R, call.scale, **call.chunks, num_stages=1,
    )  # fmt: skip
    return o
