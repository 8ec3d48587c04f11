"""What g, mu and beta get: from pairs of tokens, and from what chunks leave to the next."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import node_at, tile
from ring_la.kernels.momentum.device import SIZES, chunk, kept, kept_turned, last, number, rates_at, sharp, sum_from
from ring_la.kernels.momentum.launches import ChunksCall, Given, KeptMomentum
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.triton.tiles import head


@triton.jit
def put_gates(p, of_g, of_mu, of_beta, b, token, h, T, live, H: tl.constexpr):
    """Gradients of g, mu and beta ``[3, B, T, H]``."""
    size = (tl.num_programs(1) // H).to(tl.int64) * T * H
    tl.store(head(p, b, token, h, T, H, H, 1), of_g, live)
    tl.store(head(p + size, b, token, h, T, H, H, 1), of_mu, live)
    tl.store(head(p + 2 * size, b, token, h, T, H, H, 1), of_beta, live)


@triton.jit(do_not_specialize=SIZES)
def pairs_kernel(
    x, k, G, W, g, mu, beta, eta, table, rates, sums, out, T, R, scale, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """What gates get from one kind of reads of one chunk (see `reads_kernel`)."""
    row, b, h, token, live = chunk(table, H, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    grad = tile(head(G, b, token, h, T, H, H, V), live, e, V)
    w = tile(head(W, b, token, h, T, H, H, V), live, e, V)
    met = sharp(grad, w, k.dtype.element_ty, True) * (number(eta, b, token, h, T, live, H) * -scale)[None, :]
    asks = tile(head(x, b, token, h, T, H, H, K), live, d, K)
    keys = tile(head(k, b, token, h, T, H, H, K), live, d, K)
    met *= tl.dot(asks, tl.trans(keys))
    dgamma = tl.where(t[:, None] > t[None, :] if EARLIER else t[:, None] >= t[None, :], met, 0.0)
    at = t + (2 * C if EARLIER else 4 * C)
    da = tl.load(rates_at(sums, b, row, h, R, H, C) + at)
    db = tl.load(rates_at(sums, b, row, h, R, H, C) + at + C)
    gate = number(g, b, token, h, T, live, H)
    c = tl.cumsum(gate, 0)
    cm = tl.cumsum(number(mu, b, token, h, T, live, H), 0)
    rate = number(beta, b, token, h, T, live, H)
    m = tl.exp(cm)
    turned = kept_turned(gate, c, t, EARLIER) * rate[:, None]
    held = tl.dot(turned, dgamma) * kept(cm, cm, t, False)
    of_m = tl.sum(turned * db[None, :], 1) * m + tl.sum(held, 1) - tl.sum(held, 0)
    dsteps = tl.dot(dgamma, kept_turned(cm, cm, t, False)) + db[:, None] * m[None, :]
    dsteps *= kept(gate, c, t, EARLIER)
    of_rate = tl.sum(dsteps, 0)
    behind = tl.sum(dsteps * rate[None, :], 1) + da * tl.load(rates_at(rates, b, row, h, R, H, C) + at)
    of_g = sum_from(behind - of_rate * rate, t)
    if EARLIER:
        of_g -= behind
    put_gates(out, of_g, sum_from(of_m, t), of_rate, b, token, h, T, live, H)


@triton.jit
def along(x, y, b, row, h, R, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Σ of the products of two states of a chunk."""
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    left = node_at(x, b, row, h, R, d, e, H, K, V).to(tl.float32)
    return tl.sum(tl.sum(left * node_at(y, b, row, h, R, d, e, H, K, V).to(tl.float32), 1), 0)


@triton.jit(do_not_specialize=SIZES)
def ends_kernel(
    g, mu, beta, table, sums, Ss, Ms, dSs, dMs, out, T, R, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What gates get from the states behind one chunk: the last row of Γ, a, b, m and D."""
    row, b, h, token, live = chunk(table, H, C)
    t = tl.arange(0, C)
    da = along(Ss, dSs, b, row, h, R, H, K, V, BK, BV)
    db = -along(Ms, dSs, b, row, h, R, H, K, V, BK, BV)
    dm = along(Ms, dMs, b, row, h, R, H, K, V, BK, BV)
    dS = tl.load(rates_at(sums, b, row, h, R, H, C) + t)
    dM = tl.load(rates_at(sums, b, row, h, R, H, C) + C + t)
    c = tl.cumsum(number(g, b, token, h, T, live, H), 0)
    cm = tl.cumsum(number(mu, b, token, h, T, live, H), 0)
    rate = number(beta, b, token, h, T, live, H)
    D = kept(cm, cm, t, False) * dS[None, :]
    m = tl.exp(cm)
    ended = tl.exp(last(c, t, C) - c)
    of_rate = (tl.sum(D, 1) + db * m) * ended
    held = D * (ended * rate)[:, None]
    of_m = tl.sum(held, 1) - tl.sum(held, 0) + ended * rate * db * m - dM
    of_m += tl.where(t == C - 1, tl.sum(dM, 0) + dm * m, 0.0)
    of_g = -of_rate * rate
    of_g += tl.where(t == C - 1, tl.sum(of_rate * rate, 0) + da * tl.exp(c), 0.0)
    put_gates(out, sum_from(of_g, t), sum_from(of_m, t), of_rate, b, token, h, T, live, H)


def gates(
    call: ChunksCall, x: Given, kept: KeptMomentum, do: Tensor, dv: Tensor, behind: tuple[Tensor, Tensor], sums: Tensor
) -> Tensor:
    """Gradients of g, mu and beta ``[3, B, T, H]`` in fp32. sums: what `reads` and `writes` left."""
    found = [x.g.new_empty(3, *x.g.shape, dtype=call.wide) for _ in range(3)]
    grid = call.R, call.B * call.H
    for n, (asks, grad, scale) in enumerate(((x.q, do, call.scale), (x.p, dv, -1.0))):
        launch(
            pairs_kernel, grid, asks, x.k, grad, kept.w, x.g, x.mu, x.beta, x.eta, call.table, kept.rates, sums,
            found[n], call.T, call.R, scale, EARLIER=bool(n), **call.chunks, num_stages=1,
        )  # fmt: skip
    own = {n: value for n, value in call.chunks.items() if n != "PREC"}
    launch(
        ends_kernel, grid, x.g, x.mu, x.beta, call.table, sums, kept.S, kept.M, *behind, found[2], call.T, call.R,
        **own,
    )  # fmt: skip
    return found[0] + found[1] + found[2]
