"""What the walks read of each chunk, a program each: solutions and weights, forward and back."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import put, tile
from ring_la.kernels.momentum.device import SIZES, chunk, number, rates_at, sharp, square
from ring_la.kernels.momentum.launches import ChunksCall, Given
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head


@triton.jit(do_not_specialize=SIZES)
def forwards_kernel(
    v, p, table, squares, rates, P1, P2, U, T, R, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """T a′p, −T b′p and −T v of one chunk."""
    row, b, h, token, live = chunk(table, H, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    X = tl.load(square(squares, 2, b, row, h, R, H, C))
    asks = tile(head(p, b, token, h, T, H, H, K), live, d, K)
    at = rates_at(rates, b, row, h, R, H, C) + 2 * C + tl.arange(0, C)
    y = asks.to(tl.float32) * tl.load(at)[:, None]
    put(head(P1, b, token, h, T, H, H, K), y + sharp(X, y, asks.dtype), live, d, K)
    y = asks.to(tl.float32) * -tl.load(at + C)[:, None]
    put(head(P2, b, token, h, T, H, H, K), y + sharp(X, y, asks.dtype), live, d, K)
    x = tile(head(v, b, token, h, T, H, H, V), live, e, V)
    put(head(U, b, token, h, T, H, H, V), -(x.to(tl.float32) + sharp(X, x, x.dtype)), live, e, V)


@triton.jit(do_not_specialize=SIZES)
def backwards_kernel(
    q, k, do, eta, table, squares, rates, E1, E2, DY, T, R, scale, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What dy is of the gradients of S and M behind a chunk, and of do."""
    row, b, h, token, live = chunk(table, H, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    keys = tile(head(k, b, token, h, T, H, H, K), live, d, K)
    asks = tile(head(q, b, token, h, T, H, H, K), live, d, K)
    read = sharp(keys, asks, keys.dtype, True) * (number(eta, b, token, h, T, live, H) * scale)[:, None]
    read *= tl.load(square(squares, 0, b, row, h, R, H, C, True))
    y = -sharp(read, tile(head(do, b, token, h, T, H, H, V), live, e, V), keys.dtype)
    X = tl.load(square(squares, 2, b, row, h, R, H, C, True))
    put(head(DY, b, token, h, T, H, H, V), y + sharp(X, y, keys.dtype), live, e, V)
    at = rates_at(rates, b, row, h, R, H, C) + tl.arange(0, C)
    y = keys.to(tl.float32) * -tl.load(at)[:, None]
    put(head(E1, b, token, h, T, H, H, K), y + sharp(X, y, keys.dtype), live, d, K)
    y = keys.to(tl.float32) * tl.load(at + C)[:, None]
    put(head(E2, b, token, h, T, H, H, K), y + sharp(X, y, keys.dtype), live, d, K)


def before_forwards(
    call: ChunksCall, x: Given, squares: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What w is: of S, of M, and of nothing."""
    parts = call.tokens(call.K), call.tokens(call.K), call.tokens(call.V, dtype=call.wide)
    launch(
        forwards_kernel, (call.R, call.B * call.H), x.v, x.p, call.table, squares, rates, *parts, call.T, call.R,
        **call.chunks, num_stages=1,
    )  # fmt: skip
    return parts


def before_backwards(
    call: ChunksCall, x: Given, do: Tensor, squares: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What dy is: of dS, of dM, and of do."""
    parts = call.tokens(call.K), call.tokens(call.K), call.tokens(call.V, dtype=call.wide)
    launch(
        backwards_kernel, (call.R, call.B * call.H), x.q, x.k, do, x.eta, call.table, squares, rates, *parts, call.T,
        call.R, call.scale, **call.chunks, num_stages=1,
    )  # fmt: skip
    return parts
