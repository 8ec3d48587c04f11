"""TTT-Linear on one device: a program goes over the mini-batches of one head, with its linear model in registers.

Over a mini-batch from W and c, with x = k W + c, d the gradient of ½ |norm(x) − (v − k)|² by x, and L = tril(q kᵀ + 1):

    z = q W + c − η (L d),          o = z + norm(z),          W ← W − η_n kᵀ d,   c ← c − η_n Σ d

Back, with dz from do through the norm, p = −η dz, y = k dW + dc, and dx from dd through d (`inner_back`):

    dd = Lᵀ p − η_n d-of-the-step (y),      dη = −(L d)·dz,   dη_n −= Σ d·y,      dL = tril(p dᵀ)
    dq = dL k + dz Wᵀ,      dk = dLᵀ q + dx Wᵀ − η_n d dWᵀ − dtarget,      dv = dtarget
    dW ← dW + qᵀ dz + kᵀ dx,        dc ← dc + Σ dz + Σ dx
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.spans.table import cdiv, width

SIZES = (16, 32, 64)
"""Tokens of a mini-batch that there are kernels for."""


@triton.jit
def normal(x, inside, eps, K: tl.constexpr):
    """(x with mean 0 and variance 1, its deviation [n, 1]) over K channels."""
    centred = tl.where(inside, x - (tl.sum(x, 1) / K)[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, 1) / K + eps)[:, None]
    return centred / deviation, deviation


@triton.jit
def inner(x, target, w, b, inside, eps, K: tl.constexpr):
    """(d, norm's x, its deviation, e, the mean of e · norm's x) of a mini-batch."""
    hat, deviation = normal(x, inside, eps, K)
    e = (w * hat + b - target) * w
    second = (tl.sum(e * hat, 1) / K)[:, None]
    d = tl.where(inside, (e - (tl.sum(e, 1) / K)[:, None] - hat * second) / deviation, 0.0)
    return d, hat, deviation, e, second


@triton.jit
def inner_back(g, d, hat, deviation, e, second, w, inside, K: tl.constexpr):
    """(dx, de) given g, the gradient of d."""
    u = g / deviation
    mean = (tl.sum(u, 1) / K)[:, None]
    along = (tl.sum(u * hat, 1) / K)[:, None]
    de = tl.where(inside, u - mean - hat * along, 0.0)
    dhat = de * w * w - u * second - along * e
    first = (tl.sum(dhat, 1) / K)[:, None]
    of_hat = (tl.sum(dhat * hat, 1) / K)[:, None]
    of_deviation = -tl.sum(u * d, 1)[:, None]
    return tl.where(inside, (dhat - first - hat * of_hat) / deviation + of_deviation * hat / K, 0.0), de


@triton.jit
def rows(p, token, t, n, d, K: tl.constexpr):
    """[tokens, channels] of rows of a tensor [B · T, H, K]."""
    at = p + token[:, None] * K + d[None, :]
    return tl.load(at, (t < n)[:, None] & (d < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=("T", "NB"))
def ttt_kernel(
    q, k, v, eta, w, b, W0, c0, o, W_end, c_end, Ws, cs, T, NB, scale, eps, H: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, N: tl.constexpr, HAS_STATE: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o of one head of one batch row; KEEP: W and c before each mini-batch [B · H, NB, …]."""
    row = tl.program_id(0).to(tl.int64)
    head = row // H * T * H + row % H
    t = tl.arange(0, N)
    d = tl.arange(0, BK)
    inside = (d < K)[None, :]
    square = d[:, None] * K + d[None, :]
    whole = (d < K)[:, None] & inside
    weight = tl.load(w + row % H * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(b + row % H * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    W = tl.zeros([BK, BK], tl.float32)
    c = tl.zeros([BK], tl.float32)
    if HAS_STATE:
        W += tl.load(W0 + row * K * K + square, whole, other=0.0)
        c += tl.load(c0 + row * K + d, d < K, other=0.0)
    for i in range(NB):
        n = T - i * N
        token = head + (i * N + t).to(tl.int64) * H
        if KEEP:
            tl.store(Ws + (row * NB + i) * K * K + square, W, whole)
            tl.store(cs + (row * NB + i) * K + d, c, d < K)
        x = rows(q, token, t, n, d, K)
        y = rows(k, token, t, n, d, K)
        dt = y.dtype
        rate = tl.load(eta + token, t < n, other=0.0).to(tl.float32)
        target = rows(v, token, t, n, d, K).to(tl.float32) - y.to(tl.float32)
        model = W.to(dt)
        r = tl.dot(y, model, input_precision=PREC) + c[None, :]
        g, _, _, _, _ = inner(r, target, weight, bias, (t < n)[:, None] & inside, eps, K)
        L = tl.where(t[:, None] >= t[None, :], tl.dot(x, tl.trans(y), input_precision=PREC) * scale + 1.0, 0.0)
        z = tl.dot(x, model, input_precision=PREC) * scale + c[None, :]
        z -= rate[:, None] * tl.dot(L.to(dt), g.to(dt), input_precision=PREC)
        hat, _ = normal(z, inside, eps, K)
        out = z + hat * weight + bias
        tl.store(o + token[:, None] * K + d[None, :], out.to(o.dtype.element_ty), (t < n)[:, None] & inside)
        if n >= N:
            step = tl.sum(tl.where(t == N - 1, rate, 0.0), 0)
            W -= step * tl.dot(tl.trans(y), g.to(dt), input_precision=PREC)
            c -= step * tl.sum(g, 0)
    tl.store(W_end + row * K * K + square, W, whole)
    tl.store(c_end + row * K + d, c, d < K)


@triton.jit(do_not_specialize=("T", "NB"))
def ttt_backward_kernel(
    q, k, v, eta, w, b, do, dW_end, dc_end, Ws, cs, dq, dk, dv, deta, dw, db, dW0, dc0, T, NB, scale, eps,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, HAS_END: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """All gradients of one head of one batch row; those of w and b [B · H, K]."""
    row = tl.program_id(0).to(tl.int64)
    head = row // H * T * H + row % H
    t = tl.arange(0, N)
    d = tl.arange(0, BK)
    inside = (d < K)[None, :]
    square = d[:, None] * K + d[None, :]
    whole = (d < K)[:, None] & inside
    weight = tl.load(w + row % H * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(b + row % H * K + d, d < K, other=0.0).to(tl.float32)[None, :]
    dW = tl.zeros([BK, BK], tl.float32)
    dc = tl.zeros([BK], tl.float32)
    if HAS_END:
        dW += tl.load(dW_end + row * K * K + square, whole, other=0.0)
        dc += tl.load(dc_end + row * K + d, d < K, other=0.0)
    of_weight = tl.zeros([BK], tl.float32)
    of_bias = tl.zeros([BK], tl.float32)
    lower = t[:, None] >= t[None, :]
    for j in range(NB):
        i = NB - 1 - j
        n = T - i * N
        live = (t < n)[:, None] & inside
        token = head + (i * N + t).to(tl.int64) * H
        W = tl.load(Ws + (row * NB + i) * K * K + square, whole, other=0.0)
        c = tl.load(cs + (row * NB + i) * K + d, d < K, other=0.0)
        x = rows(q, token, t, n, d, K)
        y = rows(k, token, t, n, d, K)
        dt = y.dtype
        rate = tl.load(eta + token, t < n, other=0.0).to(tl.float32)
        target = rows(v, token, t, n, d, K).to(tl.float32) - y.to(tl.float32)
        model = W.to(dt)
        r = tl.dot(y, model, input_precision=PREC) + c[None, :]
        g, hat, deviation, e, second = inner(r, target, weight, bias, live, eps, K)
        gx = g.to(dt)
        L = tl.where(lower, tl.dot(x, tl.trans(y), input_precision=PREC) * scale + 1.0, 0.0)
        Lg = tl.dot(L.to(dt), gx, input_precision=PREC)
        z = tl.dot(x, model, input_precision=PREC) * scale + c[None, :] - rate[:, None] * Lg
        zhat, zdeviation = normal(z, inside, eps, K)
        u = rows(do, token, t, n, d, K).to(tl.float32)
        of_weight += tl.sum(u * zhat, 0)
        of_bias += tl.sum(u, 0)
        s = u * weight
        along = (tl.sum(s * zhat, 1) / K)[:, None]
        dz = tl.where(live, u + (s - (tl.sum(s, 1) / K)[:, None] - zhat * along) / zdeviation, 0.0)
        p = (-rate[:, None] * dz).to(dt)
        dg = tl.dot(tl.trans(L).to(dt), p, input_precision=PREC)
        drate = -tl.sum(Lg * dz, 1)
        dy = tl.zeros([N, BK], tl.float32)
        if n >= N:
            step = tl.sum(tl.where(t == N - 1, rate, 0.0), 0)
            to_model = dW.to(dt)
            back = tl.dot(y, to_model, input_precision=PREC) + dc[None, :]
            dg -= step * back
            drate -= tl.where(t == N - 1, tl.sum(tl.sum(g * back, 1), 0), 0.0)
            dy -= step * tl.dot(gx, tl.trans(to_model), input_precision=PREC)
        dL = tl.where(lower, tl.dot(p, tl.trans(gx), input_precision=PREC), 0.0)
        dzx = dz.to(dt)
        dx = tl.dot(dL.to(dt), y, input_precision=PREC) + tl.dot(dzx, tl.trans(model), input_precision=PREC)
        dy += tl.dot(tl.trans(dL).to(dt), x, input_precision=PREC) * scale
        dr, de = inner_back(dg, g, hat, deviation, e, second, weight, live, K)
        of_weight += tl.sum(tl.where(live, de * (2 * weight * hat + bias - target), 0.0), 0)
        of_bias += tl.sum(de * weight, 0)
        dtarget = -de * weight
        drx = dr.to(dt)
        dy += tl.dot(drx, tl.trans(model), input_precision=PREC) - dtarget
        at = token[:, None] * K + d[None, :]
        tl.store(dq + at, (dx * scale).to(dq.dtype.element_ty), live)
        tl.store(dk + at, dy.to(dk.dtype.element_ty), live)
        tl.store(dv + at, dtarget.to(dv.dtype.element_ty), live)
        tl.store(deta + token, drate, t < n)
        dW += tl.dot(tl.trans(x), dzx, input_precision=PREC) * scale
        dW += tl.dot(tl.trans(y), drx, input_precision=PREC)
        dc += tl.sum(dz, 0) + tl.sum(dr, 0)
    tl.store(dW0 + row * K * K + square, dW, whole)
    tl.store(dc0 + row * K + d, dc, d < K)
    tl.store(dw + row * K + d, of_weight, d < K)
    tl.store(db + row * K + d, of_bias, d < K)


def unsupported(*tensors: Tensor, size: int) -> str:
    """Why these kernels cannot take a call of q, k, v and others, or an empty string."""
    q = tensors[0]
    wide = [x.dtype for x in tensors if x.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    if wide:
        return f"dtype {wide[0]}"
    if q.shape[-1] > 128 or not q.numel():
        return f"heads of {q.shape[-1]}, or no tokens"
    return "" if size in SIZES else f"mini-batches of {size}"


def _constants(q: Tensor, size: int) -> dict[str, Any]:
    H, K = q.shape[2:]
    wide = width(K)
    exact = q.dtype == torch.float32
    return dict(H=H, K=K, BK=wide, N=size, PREC="tf32x3" if exact else "tf32", num_warps=16 if wide > 64 else 4)


@replayed(8)
def forward(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor, W: Tensor | None, c: Tensor | None,
    size: int, scale: float, eps: float, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """o, W ``[B, H, K, K]`` and c ``[B, H, K]`` behind the last whole mini-batch, and (`keep`) before each."""
    B, T, H, K = q.shape
    count = cdiv(T, size)
    new = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    o, W_end, c_end = torch.empty_like(v), new(B, H, K, K), new(B, H, K)
    Ws, cs = (new(B, H, count, K, K), new(B, H, count, K)) if keep else (None, None)
    launch(
        ttt_kernel, (B * H,), q, k, v, eta, w, b, *filled(W, c, by=W_end), o, W_end, c_end, *filled(Ws, cs, by=W_end),
        T, count, scale, eps, **_constants(q, size), HAS_STATE=W is not None, KEEP=keep,
    )  # fmt: skip
    return o, W_end, c_end, Ws, cs


@replayed(11)
def backward(
    do: Tensor, dW: Tensor | None, dc: Tensor | None, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor,
    b: Tensor, Ws: Tensor, cs: Tensor, size: int, scale: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk, dv, and in fp32 deta, dw and db by batch row, and those of the W and c that enter."""
    B, T, H, K = q.shape
    new = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    deta, dw, db, dW0, dc0 = new(B, T, H), new(B, H, K), new(B, H, K), new(B, H, K, K), new(B, H, K)
    launch(
        ttt_backward_kernel, (B * H,), q, k, v, eta, w, b, do, *filled(dW, dc, by=dW0), Ws, cs, dq, dk, dv, deta, dw,
        db, dW0, dc0, T, cdiv(T, size), scale, eps, **_constants(q, size), HAS_END=dW is not None,
    )  # fmt: skip
    return dq, dk, dv, deta, dw, db, dW0, dc0
