"""Squares of a chunk's tokens: Γ, Γ′ and the inverse, once for all kernels; and the numbers of a chunk."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import tile
from ring_la.kernels.momentum.device import SIZES, chunk, kept, last, number, rates_at, sharp, square
from ring_la.kernels.momentum.launches import ROWS, SQUARES, ChunksCall, Given
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head
from ring_la.kernels.wy.inverse import invert


@triton.jit(do_not_specialize=SIZES)
def squares_kernel(
    k, p, g, mu, beta, eta, table, squares, rates, T, R, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Γ, Γ′, T less the identity, and the numbers of a chunk."""
    row, b, h, token, live = chunk(table, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    gate = number(g, b, token, h, T, live, H)
    c = tl.cumsum(gate, 0)
    cm = tl.cumsum(number(mu, b, token, h, T, live, H), 0)
    rate = number(beta, b, token, h, T, live, H)
    step = number(eta, b, token, h, T, live, H)
    D = kept(cm, cm, t, False)
    m = tl.exp(cm)
    steps = kept(gate, c, t, False) * rate[None, :]
    ended = tl.exp(last(c, t, C) - c) * rate
    m_end = last(cm, t, C)
    into = rates_at(rates, b, row, h, R, H, C) + t
    to_S = tl.sum(ended[:, None] * D, 0)
    to_M = tl.exp(m_end - cm)
    tl.store(into, to_S * step)
    tl.store(into + C, to_M * step)
    tl.store(into + 7 * C, to_S)
    tl.store(into + 8 * C, to_M)
    tl.store(into + 4 * C, tl.exp(c))
    tl.store(into + 5 * C, tl.sum(steps * m[None, :], 1))
    whole = tl.where(t == 0, tl.exp(last(c, t, C)), tl.where(t == 1, tl.sum(ended * m, 0), tl.exp(m_end)))
    tl.store(into + 6 * C, whole)
    exact: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    tl.store(square(squares, 0, b, row, h, R, H, C), sharp(steps, D, exact))
    steps = kept(gate, c, t, True) * rate[None, :]
    tl.store(into + 2 * C, tl.exp(c - gate))
    tl.store(into + 3 * C, tl.sum(steps * m[None, :], 1))
    gamma = sharp(steps, D, exact)
    tl.store(square(squares, 1, b, row, h, R, H, C), gamma)
    keys = tile(head(k, b, token, h, T, H, H, K), live, d, K)
    asks = tile(head(p, b, token, h, T, H, H, K), live, d, K)
    L = sharp(asks, keys, keys.dtype, True) * gamma * step[None, :]
    tl.store(square(squares, 2, b, row, h, R, H, C), invert(L, C, "tf32x3"))


def squares_of(call: ChunksCall, x: Given) -> tuple[Tensor, Tensor]:
    """The squares ``[B, R, H, 3, C, C]``, and the chunks' numbers."""
    C = call.constants["C"]
    squares, rates = call.nodes(SQUARES, C, C, dtype=call.wide), call.nodes(ROWS, C, dtype=call.wide)
    own = {n: value for n, value in call.chunks.items() if n not in ("V", "BV")}
    launch(
        squares_kernel, (call.R, call.B * call.H), x.k, x.p, x.g, x.mu, x.beta, x.eta, call.table, squares, rates,
        call.T, call.R, **own, WIDE=call.dtype == call.wide, num_stages=1,
    )  # fmt: skip
    return squares, rates
