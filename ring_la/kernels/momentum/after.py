"""Outputs, side by side when the walk is done."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import node_at, put, tile
from ring_la.kernels.momentum.device import SIZES, chunk, number, rates_at, sharp, square
from ring_la.kernels.momentum.launches import ChunksCall, Given, KeptMomentum
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head


@triton.jit(do_not_specialize=SIZES)
def outputs_kernel(
    q, k, eta, table, squares, rates, W, Ss, Ms, O, T, R, scale, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """o of one chunk."""
    row, b, h, token, live = chunk(table, H, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    keys = tile(head(k, b, token, h, T, H, H, K), live, d, K)
    asks = tile(head(q, b, token, h, T, H, H, K), live, d, K)
    read = sharp(asks, keys, keys.dtype, True) * -number(eta, b, token, h, T, live, H)[None, :]
    read *= tl.load(square(squares, 0, b, row, h, R, H, C))
    w = tile(head(W, b, token, h, T, H, H, V), live, e, V)
    o = sharp(read, w, keys.dtype)
    at = rates_at(rates, b, row, h, R, H, C) + tl.arange(0, C)
    wide = asks.to(tl.float32)
    S = node_at(Ss, b, row, h, R, d, e, H, K, V)
    o = tl.dot((wide * tl.load(at + 4 * C)[:, None]).to(keys.dtype), S, o)
    M = node_at(Ms, b, row, h, R, d, e, H, K, V)
    o = tl.dot((wide * -tl.load(at + 5 * C)[:, None]).to(keys.dtype), M, o)
    put(head(O, b, token, h, T, H, H, V), o * scale, live, e, V)


def outputs(call: ChunksCall, x: Given, kept: KeptMomentum) -> Tensor:
    """o ``[B, T, H, V]``."""
    o = call.tokens(call.V)
    launch(
        outputs_kernel, (call.R, call.B * call.H), x.q, x.k, x.eta, call.table, kept.squares, kept.rates, kept.w,
        kept.S, kept.M, o, call.T, call.R, call.scale, **call.chunks, num_stages=1,
    )  # fmt: skip
    return o
