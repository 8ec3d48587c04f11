"""What is done side by side, a chunk of mini-batches a program: outputs, what the walk back reads, and gradients.

A model W inside a chunk is the one at its border and the steps since: see `gradient_steps`. Squares that are needed
both ways round are two products: nothing that came out of a product is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.gradient_steps.device import SIZES, before, normal, put, rows, steps
from ring_la.kernels.gradient_steps.launches import KeptSteps, Prepared, StepsCall
from ring_la.kernels.runtime.launch import launch


@triton.jit
def chunk(T, H: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """(row of batch and head, head, places of the tokens, of the last ones of their mini-batches, which are there)."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * C + tl.arange(0, C)
    first = row // H * T * H + row % H
    return row, row % H, first + t.to(tl.int64) * H, first + (t // N * N + N - 1).to(tl.int64) * H, t < T


@triton.jit
def model(Ws, cs, at, d, K: tl.constexpr):
    """(W as [V, K], c) before a chunk."""
    W = tl.load(Ws + at * K * K + d[:, None] * K + d[None, :], (d < K)[:, None] & (d < K)[None, :], other=0.0)
    return W, tl.load(cs + at * K + d, d < K, other=0.0)


@triton.jit
def read(q, k, g, W, c, rate, last, t, scale, N: tl.constexpr, PREC: tl.constexpr):
    """z of a chunk: q W + c less the steps, of tiles of which W is [V, K]."""
    L = (tl.dot(q, tl.trans(k), input_precision=PREC) * scale + 1.0) * steps(rate, last, t, N)
    z = tl.dot(q, tl.trans(W), input_precision=PREC) * scale
    return z + c[None, :] - tl.dot(L.to(g.dtype), g, input_precision=PREC)


@triton.jit(do_not_specialize=SIZES)
def outputs_kernel(
    Q, K_, D, eta, w, b, Ws, cs, O, T, NC, scale, eps, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o of one chunk, or (not NORM) z."""
    row, head, token, ends, live = chunk(T, H, N, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    at = row * NC + tl.program_id(0)
    W, c = model(Ws, cs, at, d, K)
    q = rows(Q, token, live, d, K)
    k = rows(K_, token, live, d, K)
    g = rows(D, token, live, d, K)
    rate = tl.load(eta + token, live, other=0.0).to(tl.float32)
    last = tl.load(eta + ends, live, other=0.0).to(tl.float32)
    z = read(q, k, g, W, c, rate, last, t, scale, N, PREC)
    if NORM:
        weight = tl.load(w + head * K + d, d < K, other=0.0).to(tl.float32)[None, :]
        bias = tl.load(b + head * K + d, d < K, other=0.0).to(tl.float32)[None, :]
        hat, _ = normal(z, d, eps, K)
        z += hat * weight + bias
    put(O, z, token, live, d, K)


@triton.jit(do_not_specialize=SIZES)
def before_kernel(
    Q, K_, DO, D, eta, w, Ws, cs, DZ, DD, DW, DB, T, NC, scale, eps, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, N: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dz of one chunk, what it is to dd, and the parts of dw and db that come from outputs."""
    row, head, token, ends, live = chunk(T, H, N, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    at = row * NC + tl.program_id(0)
    q = rows(Q, token, live, d, K)
    k = rows(K_, token, live, d, K)
    rate = tl.load(eta + token, live, other=0.0).to(tl.float32)
    dz = rows(DO, token, live, d, K).to(tl.float32)
    if NORM:
        g = rows(D, token, live, d, K)
        W, c = model(Ws, cs, at, d, K)
        last = tl.load(eta + ends, live, other=0.0).to(tl.float32)
        weight = tl.load(w + head * K + d, d < K, other=0.0).to(tl.float32)[None, :]
        hat, over = normal(read(q, k, g, W, c, rate, last, t, scale, N, PREC), d, eps, K)
        tl.store(DW + at * K + d, tl.sum(dz * hat, 0), d < K)
        tl.store(DB + at * K + d, tl.sum(dz, 0), d < K)
        s = dz * weight
        along = (tl.sum(s * hat, 1) / K)[:, None]
        dz += tl.where((d < K)[None, :], s - (tl.sum(s, 1) / K)[:, None] - hat * along, 0.0) * over[:, None]
    put(DZ, dz * scale, token, live, d, K)
    own = (t[:, None] // N == t[None, :] // N) & (t[:, None] <= t[None, :])  # [s, t]
    P = (tl.dot(k, tl.trans(q), input_precision=PREC) * scale + 1.0) * tl.where(own, -rate[None, :], 0.0)
    put(DD, tl.dot(P.to(k.dtype), dz.to(k.dtype), input_precision=PREC), token, live, d, K)


@triton.jit(do_not_specialize=SIZES)
def losses_kernel(
    K_, V_, D, eta, w, b, Ws, cs, hats, overs, means, alongs, T, NC, eps, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, N: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The norm of k W + c of one chunk, and what inner losses were, once more."""
    row, head, token, ends, live = chunk(T, H, N, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    at = row * NC + tl.program_id(0)
    W, c = model(Ws, cs, at, d, K)
    k = rows(K_, token, live, d, K)
    g = rows(D, token, live, d, K)
    last = tl.load(eta + ends, live, other=0.0).to(tl.float32)
    L = (tl.dot(k, tl.trans(k), input_precision=PREC) + 1.0) * before(last, t, N)
    x = tl.dot(k, tl.trans(W), input_precision=PREC) + c[None, :]
    hat, over = normal(x - tl.dot(L.to(g.dtype), g, input_precision=PREC), d, eps, K)
    weight = tl.load(w + head * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(b + head * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    target = rows(V_, token, live, d, K).to(tl.float32) - k.to(tl.float32)
    e = (weight * hat + bias - target) * weight
    put(hats, hat, token, live, d, K)
    tl.store(overs + token, over, live)
    tl.store(means + token, tl.sum(e, 1) / K, live)
    tl.store(alongs + token, tl.sum(e * hat, 1) / K, live)


@triton.jit(do_not_specialize=SIZES)
def gradients_kernel(
    Q, K_, V_, D, eta, w, b, Ws, dWs, DZ, hats, DX, DE, back, DQ, DK, DV, deta, DW, DB, T, NC, scale, unscale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv and the rates' gradients of one chunk, and the parts of dw and db that come from its inner losses."""
    row, head, token, ends, live = chunk(T, H, N, C)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    at = row * NC + tl.program_id(0)
    square = d[:, None] * K + d[None, :]
    whole = (d < K)[:, None] & (d < K)[None, :]
    rate = tl.load(eta + token, live, other=0.0).to(tl.float32)
    last = tl.load(eta + ends, live, other=0.0).to(tl.float32)
    q = rows(Q, token, live, d, K)
    k = rows(K_, token, live, d, K)
    g = rows(D, token, live, d, K)
    dz = rows(DZ, token, live, d, K)
    G = tl.dot(dz, tl.trans(g), input_precision=PREC)
    own = (t[:, None] // N == t[None, :] // N) & (t[:, None] >= t[None, :])
    S = tl.dot(q, tl.trans(k), input_precision=PREC) * scale + 1.0
    of_rate = -tl.sum(tl.where(own, S * G, 0.0), 1) * unscale
    W = tl.load(Ws + at * K * K + square, whole, other=0.0)
    dq = tl.dot(dz, W, input_precision=PREC)
    dq -= tl.dot((G * steps(rate, last, t, N)).to(k.dtype), k, input_precision=PREC)
    put(DQ, dq, token, live, d, K)
    dx = rows(DX, token, live, d, K)
    dk = tl.dot(dx, W, input_precision=PREC)
    R = tl.load(dWs + at * K * K + square, whole, other=0.0)
    dk -= tl.dot(g, R, input_precision=PREC) * last[:, None]
    after = t[:, None] // N < t[None, :] // N  # [s, t]
    to = tl.where(after, last[:, None], 0.0)
    mine = tl.where((t[:, None] // N == t[None, :] // N) & (t[:, None] <= t[None, :]), rate[None, :], to)
    dk -= tl.dot((tl.dot(g, tl.trans(dz), input_precision=PREC) * mine).to(q.dtype), q, input_precision=PREC)
    F = tl.dot(g, tl.trans(dx), input_precision=PREC) * to + tl.dot(dx, tl.trans(g), input_precision=PREC) * before(
        last, t, N
    )
    dk -= tl.dot(F.to(k.dtype), k, input_precision=PREC)
    weight = tl.load(w + head * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(b + head * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    de = rows(DE, token, live, d, K).to(tl.float32)
    put(DK, dk + de * weight, token, live, d, K)
    put(DV, -de * weight, token, live, d, K)
    target = rows(V_, token, live, d, K).to(tl.float32) - k.to(tl.float32)
    hat = rows(hats, token, live, d, K).to(tl.float32)
    tl.store(DW + at * K + d, tl.sum(de * (2 * weight * hat + bias - target), 0), d < K)
    tl.store(DB + at * K + d, tl.sum(de * weight, 0), d < K)
    said = tl.load(back + token, live, other=0.0)
    step = tl.sum(tl.where(t[:, None] // N == t[None, :] // N, said[None, :], 0.0), 1)
    of_rate -= tl.where(t % N == N - 1, step, 0.0)
    tl.store(deta + token, of_rate, live)


def outputs(
    call: StepsCall, q: Tensor, k: Tensor, eta: Tensor, w: Tensor, b: Tensor, kept: KeptSteps, norm: bool
) -> Tensor:  # fmt: skip
    """o in q's dtype, or z in fp32."""
    o = q.new_empty(q.shape, dtype=q.dtype if norm else call.wide)
    launch(
        outputs_kernel, (call.NC, call.B * call.H), q, k, kept.d, eta, w, b, kept.W, kept.c, o, call.T, call.NC,
        call.scale, call.eps, **call.constants, NORM=norm, num_warps=call.walk_warps, num_stages=1,
    )  # fmt: skip
    return o


def prepare(
    call: StepsCall, given: Sequence[Tensor], do: Tensor, kept: KeptSteps, norm: bool
) -> tuple[Prepared, Tensor, Tensor]:  # fmt: skip
    """What the walk back reads, and parts of dw and db ``[B · H, NC, K]``.

    given: q, k, v, eta, w, b. do: dz where o is z (not `norm`).
    """
    q, k, v, eta, w, b = given
    tokens = [q.new_empty(q.shape) for _ in range(3)]
    prepared = Prepared(*tokens, *(q.new_empty(q.shape[:3], dtype=call.wide) for _ in range(3)))
    dw, db = (kept.c.new_zeros(kept.c.shape) for _ in range(2))
    grid, how = (call.NC, call.B * call.H), dict(call.constants, num_warps=call.walk_warps, num_stages=1)
    launch(
        before_kernel, grid, q, k, do, kept.d, eta, w, kept.W, kept.c, *prepared[:2], dw, db, call.T, call.NC,
        call.scale, call.eps, **how, NORM=norm,
    )  # fmt: skip
    launch(
        losses_kernel, grid, k, v, kept.d, eta, w, b, kept.W, kept.c, *prepared[2:], call.T, call.NC, call.eps, **how
    )
    return prepared, dw, db


def gradients(
    call: StepsCall, given: Sequence[Tensor], kept: KeptSteps, prepared: Prepared, walked: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """dq, dk, dv, deta in fp32, and parts of dw and db. given: q, k, v, eta, w, b. walked: dx, de, what rates get from
    the steps, and dW behind each chunk."""
    q, k, v, eta, w, b = given
    dx, de, back, dWs = walked
    dq, dk, dv = (q.new_empty(q.shape) for _ in range(3))
    deta = q.new_empty(q.shape[:3], dtype=call.wide)
    dw, db = (kept.c.new_empty(kept.c.shape) for _ in range(2))
    launch(
        gradients_kernel, (call.NC, call.B * call.H), q, k, v, kept.d, eta, w, b, kept.W, dWs, prepared.dz,
        prepared.hat, dx, de, back, dq, dk, dv, deta, dw, db, call.T, call.NC, call.scale, 1 / call.scale,
        **call.constants, num_warps=call.walk_warps, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv, deta, dw, db
