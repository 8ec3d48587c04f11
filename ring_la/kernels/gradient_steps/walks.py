"""The walks over mini-batches, one program a head of a batch row: all that has to wait for the step before.

Models are [V, K] in registers, gradients and what they are made of [V, tokens]. See `gradient_steps`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.gradient_steps.device import SIZES, columns, four, pair, put_columns, rows
from ring_la.kernels.gradient_steps.launches import KeptSteps, Prepared, StepsCall
from ring_la.kernels.runtime.launch import filled, launch


@triton.jit
def place(T, H: tl.constexpr):
    """(row of batch and head, head, first token of it in [B · T, H, K])."""
    row = tl.program_id(0).to(tl.int64)
    return row, row % H, row // H * T * H + row % H


@triton.jit(do_not_specialize=SIZES)
def forwards_kernel(
    k, v, eta, w, b, W0, c0, D, Ws, cs, W_end, c_end, T, NB, NC, eps, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, N: tl.constexpr, C: tl.constexpr, HAS_STATE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """d of all tokens, W (as [V, K]) and c before each chunk, and the last ones."""
    row, head, first = place(T, H)
    t = tl.arange(0, N)
    d = tl.arange(0, BK)
    inside = (d < K)[:, None]
    square = d[:, None] * K + d[None, :]
    whole = inside & (d < K)[None, :]
    weight = tl.load(w + head * K + d, d < K, other=0.0).to(tl.float32)[:, None]
    bias = tl.load(b + head * K + d, d < K, other=0.0).to(tl.float32)[:, None]
    S = tl.zeros([BK, BK], tl.float32)
    c = tl.zeros([BK], tl.float32)
    if HAS_STATE:
        S += tl.load(W0 + row * K * K + d[None, :] * K + d[:, None], whole, other=0.0)
        c += tl.load(c0 + row * K + d, d < K, other=0.0)
    token = first + t.to(tl.int64) * H
    live = t < N
    target = columns(v, token, live, d, K).to(tl.float32) - columns(k, token, live, d, K).to(tl.float32)
    for i in range(NB):
        token = first + (i * N + t).to(tl.int64) * H
        if i % (C // N) == 0:
            at = row * NC + i // (C // N)
            tl.store(Ws + at * K * K + square, S.to(Ws.dtype.element_ty), whole)
            tl.store(cs + at * K + d, c, d < K)
        y = rows(k, token, live, d, K)
        rate = tl.load(eta + (first + (i + 1) * N * H - H)).to(tl.float32)
        later = token + N * H  # the next ones are on their way meanwhile
        more = (t < N) & (i + 1 < NB)
        ahead = columns(v, later, more, d, K).to(tl.float32) - columns(k, later, more, d, K).to(tl.float32)
        x = tl.dot(S.to(y.dtype), tl.trans(y), input_precision=PREC) + c[:, None]
        centred = tl.where(inside, x - (tl.sum(x, 0) / K)[None, :], 0.0)
        over = (1.0 / tl.sqrt(tl.sum(centred * centred, 0) / K + eps))[None, :]
        hat = centred * over
        e = (weight * hat + bias - target) * weight
        total, along = tl.reduce((e, e * hat), 0, pair)
        g = tl.where(inside, (e - (total / K)[None, :] - hat * (along / K)[None, :]) * over, 0.0)
        put_columns(D, g, token, live, d, K)
        c -= rate * tl.sum(g, 1)
        S = tl.dot((g * -rate).to(y.dtype), y, S, input_precision=PREC)
        target = ahead
    tl.store(W_end + row * K * K + d[None, :] * K + d[:, None], S, whole)
    tl.store(c_end + row * K + d, c, d < K)


@triton.jit(do_not_specialize=SIZES)
def backwards_kernel(
    q, k, eta, w, D, DZ, DD, hats, overs, means, alongs, dW_end, dc_end, DX, DE, read, dWs, dW0, dc0, T, NB, NC,
    unscale, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    HAS_END: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dx, de and Σ d (k dW + dc) of all tokens, dW (as [V, K]) behind each chunk, and the gradients of the first
    model."""
    row, head, first = place(T, H)
    t = tl.arange(0, N)
    d = tl.arange(0, BK)
    live = t < N
    inside = (d < K)[:, None]
    square = d[:, None] * K + d[None, :]
    whole = inside & (d < K)[None, :]
    weight = tl.load(w + head * K + d, d < K, other=0.0).to(tl.float32)[:, None]
    R = tl.zeros([BK, BK], tl.float32)
    rc = tl.zeros([BK], tl.float32)
    if HAS_END:
        R += tl.load(dW_end + row * K * K + d[None, :] * K + d[:, None], whole, other=0.0)
        rc += tl.load(dc_end + row * K + d, d < K, other=0.0)
    for j in range(NB):
        i = NB - 1 - j
        token = first + (i * N + t).to(tl.int64) * H
        if (i + 1) % (C // N) == 0 or j == 0:
            tl.store(dWs + (row * NC + i // (C // N)) * K * K + square, R.to(dWs.dtype.element_ty), whole)
        y = rows(k, token, live, d, K)
        x = rows(q, token, live, d, K)
        rate = tl.load(eta + (first + (i + 1) * N * H - H)).to(tl.float32)
        over = tl.load(overs + token)[None, :]
        mean = tl.load(means + token)[None, :]
        second = tl.load(alongs + token)[None, :]
        hat = columns(hats, token, live, d, K).to(tl.float32)
        g = columns(D, token, live, d, K).to(tl.float32)
        dd = columns(DD, token, live, d, K).to(tl.float32)
        dz = columns(DZ, token, live, d, K)
        e = tl.where(inside, g / over + mean + hat * second, 0.0)
        back = tl.dot(R.to(y.dtype), tl.trans(y), input_precision=PREC) + rc[:, None]
        u = (dd - rate * back) * over
        total, along, of_over, to_rate = tl.reduce((u, u * hat, u * g, g * back), 0, four)
        along = (along / K)[None, :]
        de = tl.where(inside, u - (total / K)[None, :] - hat * along, 0.0)
        dhat = de * weight * weight - u * second - along * e
        total, of_hat = tl.reduce((dhat, dhat * hat), 0, pair)
        dx = (dhat - (total / K)[None, :] - hat * (of_hat / K)[None, :]) * over - hat * (of_over / K)[None, :]
        dx = tl.where(inside, dx, 0.0)
        put_columns(DX, dx, token, live, d, K)
        put_columns(DE, de, token, live, d, K)
        tl.store(read + token, to_rate)
        rc += tl.sum(dx, 1) + tl.sum(dz.to(tl.float32), 1) * unscale
        R = tl.dot(dx.to(y.dtype), y, R, input_precision=PREC)
        R = tl.dot(dz, x, R, input_precision=PREC)
    tl.store(dW0 + row * K * K + d[None, :] * K + d[:, None], R, whole)
    tl.store(dc0 + row * K + d, rc, d < K)


def forwards(
    call: StepsCall, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor, W: Tensor | None, c: Tensor | None
) -> tuple[KeptSteps, Tensor, Tensor]:
    """What backward keeps, and W ``[B, H, K, K]`` and c ``[B, H, K]`` behind the last mini-batch, in fp32."""
    B, H, K = call.B, call.H, call.K
    new = k.new_empty
    kept = KeptSteps(new(k.shape), new(B * H, call.NC, K, K), new(B * H, call.NC, K, dtype=call.wide))
    W_end, c_end = new(B, H, K, K, dtype=call.wide), new(B, H, K, dtype=call.wide)
    launch(
        forwards_kernel, (B * H,), k, v, eta, w, b, *filled(W, c, by=W_end), *kept, W_end, c_end, call.T, call.NB,
        call.NC, call.eps, **call.constants, HAS_STATE=W is not None, num_warps=call.walk_warps, num_stages=2,
    )  # fmt: skip
    return kept, W_end, c_end


def backwards(
    call: StepsCall, q: Tensor, k: Tensor, eta: Tensor, w: Tensor, d: Tensor, prepared: Prepared, dW: Tensor | None,
    dc: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx and de ``[B, T, H, K]``, what rates get from the steps ``[B, T, H]``, dW behind each chunk, and dW and dc of
    the first model."""
    B, H, K = call.B, call.H, call.K
    dx, de = (d.new_empty(d.shape) for _ in range(2))
    read = d.new_empty(d.shape[:3], dtype=call.wide)
    dWs, dW0 = d.new_empty(B * H, call.NC, K, K), d.new_empty(B, H, K, K, dtype=call.wide)
    dc0 = dW0.new_empty(B, H, K)
    launch(
        backwards_kernel, (B * H,), q, k, eta, w, d, *prepared, *filled(dW, dc, by=dW0), dx, de, read, dWs, dW0, dc0,
        call.T, call.NB, call.NC, 1 / call.scale, **call.constants, HAS_END=dW is not None, num_warps=call.walk_warps,
        num_stages=2,
    )  # fmt: skip
    return dx, de, read, dWs, dW0, dc0
