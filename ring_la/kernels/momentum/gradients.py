"""Gradients, side by side when the walk back is done: of what reads states, and of what writes them.

What gates get of them is a kernel's own (`gates`): both in one need more registers than there are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import node_at, put, tile
from ring_la.kernels.momentum.device import SIZES, chunk, number, rates_at, sharp, square
from ring_la.kernels.momentum.launches import ROWS, ChunksCall, Given, KeptMomentum
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head


@triton.jit(do_not_specialize=SIZES)
def reads_kernel(
    x, k, G, W, eta, table, squares, rates, Ss, Ms, DX, sums, T, R, scale, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """Gradients of what reads S after its token (EARLIER: before it), and of the a and b that it reads it with, of the
    gradient G of what is read, over the scale."""
    row, b, h, token, live = chunk(table, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    at = t + (2 * C if EARLIER else 4 * C)
    said = rates_at(rates, b, row, h, R, H, C) + at
    into = rates_at(sums, b, row, h, R, H, C) + at
    grad = tile(head(G, b, token, h, T, H, H, V), live, e, V)
    w = tile(head(W, b, token, h, T, H, H, V), live, e, V)
    narrow = grad.to(k.dtype.element_ty)
    gamma = tl.load(square(squares, 1 if EARLIER else 0, b, row, h, R, H, C))
    gamma *= sharp(grad, w, narrow.dtype, True) * number(eta, b, token, h, T, live, H)[None, :]
    dx = -sharp(gamma, tile(head(k, b, token, h, T, H, H, K), live, d, K), narrow.dtype)
    tl.debug_barrier()  # what follows is not begun before: registers are full
    asks = tile(head(x, b, token, h, T, H, H, K), live, d, K).to(tl.float32)
    y = tl.dot(narrow, tl.trans(node_at(Ss, b, row, h, R, d, e, H, K, V)))
    tl.store(into, tl.sum(asks * y, 1) * scale)
    dx += y * tl.load(said)[:, None]
    y = tl.dot(narrow, tl.trans(node_at(Ms, b, row, h, R, d, e, H, K, V)))
    tl.store(into + C, tl.sum(asks * y, 1) * -scale)
    dx -= y * tl.load(said + C)[:, None]
    put(head(DX, b, token, h, T, H, H, K), dx * scale, live, d, K)


@triton.jit(do_not_specialize=SIZES)
def writes_kernel(
    q, k, p, do, DV, W, eta, table, squares, rates, dSs, dMs, DK, deta, sums, T, R, scale, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dk and deta of one chunk, and the gradients of what its tokens weigh in the last S and M, times the weights of
    M."""
    row, b, h, token, live = chunk(table, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    step = number(eta, b, token, h, T, live, H)
    w = tile(head(W, b, token, h, T, H, H, V), live, e, V)
    met = sharp(w, tile(head(do, b, token, h, T, H, H, V), live, e, V), k.dtype.element_ty, True)
    met *= tl.load(square(squares, 0, b, row, h, R, H, C, True)) * -scale
    asks = tile(head(q, b, token, h, T, H, H, K), live, d, K)
    dk = sharp(met, asks, asks.dtype)
    met = sharp(w, tile(head(DV, b, token, h, T, H, H, V), live, e, V), k.dtype.element_ty, True)
    met *= tl.load(square(squares, 1, b, row, h, R, H, C, True))
    asks = tile(head(p, b, token, h, T, H, H, K), live, d, K)
    dk += sharp(met, asks, asks.dtype)
    tl.debug_barrier()  # what follows is not begun before: registers are full
    keys = tile(head(k, b, token, h, T, H, H, K), live, d, K).to(tl.float32)
    narrow = w.to(k.dtype.element_ty)
    into = rates_at(sums, b, row, h, R, H, C) + t
    y = tl.dot(narrow, tl.trans(node_at(dSs, b, row, h, R, d, e, H, K, V)))
    tl.store(into, tl.sum(keys * y, 1) * -step)
    said = rates_at(rates, b, row, h, R, H, C) + 7 * C + t
    dk -= y * tl.load(said)[:, None]
    y = tl.dot(narrow, tl.trans(node_at(dMs, b, row, h, R, d, e, H, K, V)))
    to_M = tl.load(said + C)
    tl.store(into + C, tl.sum(keys * y, 1) * step * to_M)
    dk += y * to_M[:, None]
    put(head(DK, b, token, h, T, H, H, K), dk * step[:, None], live, d, K)
    tl.store(head(deta, b, token, h, T, H, H, 1), tl.sum(dk * keys, 1), live)


def reads(
    call: ChunksCall, x: Given, kept: KeptMomentum, do: Tensor, dv: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq and dp; those of a and b go into `sums`, where the rates are."""
    dq, dp = call.tokens(call.K), call.tokens(call.K)
    for asks, grad, into, scale in ((x.q, do, dq, call.scale), (x.p, dv, dp, -1.0)):
        launch(
            reads_kernel, (call.R, call.B * call.H), asks, x.k, grad, kept.w, x.eta, call.table, kept.squares,
            kept.rates, kept.S, kept.M, into, sums, call.T, call.R, scale, EARLIER=into is dp, **call.chunks,
            num_stages=1,
        )  # fmt: skip
    return dq, dp


def writes(
    call: ChunksCall, x: Given, kept: KeptMomentum, do: Tensor, dv: Tensor, behind: tuple[Tensor, Tensor], sums: Tensor
) -> tuple[Tensor, Tensor]:
    """dk, and deta in fp32. behind: gradients of S and M behind chunks."""
    dk, deta = call.tokens(call.K), x.eta.new_empty(x.eta.shape, dtype=call.wide)
    launch(
        writes_kernel, (call.R, call.B * call.H), x.q, x.k, x.p, do, dv, kept.w, x.eta, call.table,
        kept.squares, kept.rates, *behind, dk, deta, sums, call.T, call.R, call.scale, **call.chunks, num_stages=1,
    )  # fmt: skip
    return dk, deta


def room(call: ChunksCall) -> Tensor:
    """Room for `sums`."""
    return call.nodes(ROWS, call.constants["C"], dtype=call.wide)
