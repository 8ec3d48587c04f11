"""RWKV-6's bonus, ``o + scale · w v`` with w = Σ r u k: one pass each way.

dw = scale · Σ do v,   dr = dw u k,   dk = dw u r,   dv = scale · w do,   du = Σ_t dw r k
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv, width
from ring_la.kernels.spans.heads import summed

TOKENS, STEPS, WARPS = 16, 8, 4
"""Tokens a tile, and tiles a program, whose share of du is summed up by PyTorch."""


def unsupported(*tensors: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    wide = [x.dtype for x in tensors if x.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    if wide:
        return f"dtype {wide[0]}"
    if not all(x.numel() for x in tensors):
        return "no tokens"
    return "" if max(x.shape[-1] for x in tensors) <= 256 else "heads beyond 256"


@triton.jit(do_not_specialize=("rows",))
def bonus_kernel(
    o, r, k, v, u, out, dr, dk, dv, du, rows, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, STEPS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """STEPS tiles of BT of all B · T tokens, one head. BACK: o is its gradient; dr and dk by value head, du
    [programs, H, K]."""
    h = tl.program_id(1)
    d = tl.arange(0, BK)[None, :]
    e = tl.arange(0, BV)[None, :]
    w = tl.load(u + h * K + d, d < K, other=0.0).to(tl.float32)
    total = tl.zeros([BT, BK], tl.float32)
    for step in range(STEPS):
        i = (tl.program_id(0).to(tl.int64) * STEPS + step) * BT + tl.arange(0, BT)[:, None]
        live = i < rows
        keys = (i * HK + h // (H // HK)) * K + d
        x = tl.load(r + keys, live & (d < K), other=0.0).to(tl.float32)
        y = tl.load(k + keys, live & (d < K), other=0.0).to(tl.float32)
        at = (i * H + h) * V + e
        value = tl.load(v + at, live & (e < V), other=0.0).to(tl.float32)
        g = tl.load(o + at, live & (e < V), other=0.0).to(tl.float32)
        own = scale * tl.sum(x * y * w, 1)[:, None]
        if BACK:
            into = (i * H + h) * K + d
            back = scale * tl.sum(g * value, 1)[:, None]
            tl.store(dv + at, (own * g).to(dv.dtype.element_ty), live & (e < V))
            tl.store(dr + into, (back * y * w).to(dr.dtype.element_ty), live & (d < K))
            tl.store(dk + into, (back * x * w).to(dk.dtype.element_ty), live & (d < K))
            total += back * x * y
        else:
            tl.store(out + at, (g + own * value).to(out.dtype.element_ty), live & (e < V))
    if BACK:
        part = (tl.program_id(0).to(tl.int64) * H + h) * K
        tl.store(du + part + d, tl.sum(total, 0)[None, :], d < K)


def _sizes(r: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    (B, T, H, V), (HK, K) = v.shape, r.shape[2:]
    return B * T, cdiv(B * T, TOKENS * STEPS), H, HK, K, V


@replayed(5)
def forward(o: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float) -> Tensor:
    rows, programs, H, HK, K, V = _sizes(r, v)
    out = torch.empty_like(o)
    launch(
        bonus_kernel, (programs, H), o, r, k, v, u, out, o, o, o, o, rows, scale, H=H, HK=HK, K=K, V=V, BK=width(K),
        BV=width(V), BT=TOKENS, STEPS=STEPS, BACK=False, num_warps=WARPS,
    )  # fmt: skip
    return out


@replayed(5)
def _gradients(
    do: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dr and dk by value head, dv, and du by program."""
    rows, programs, H, HK, K, V = _sizes(r, v)
    dr, dk = (x.new_empty(*v.shape[:3], K) for x in (r, k))
    dv, du = torch.empty_like(v), u.new_empty(programs, H, K, dtype=torch.float32)
    launch(
        bonus_kernel, (programs, H), do, r, k, v, u, do, dr, dk, dv, du, rows, scale, H=H, HK=HK, K=K, V=V,
        BK=width(K), BV=width(V), BT=TOKENS, STEPS=STEPS, BACK=True, num_warps=WARPS,
    )  # fmt: skip
    return dr, dk, dv, du


def backward(
    do: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of r, k, v and u."""
    dr, dk, dv, du = _gradients(do, r, k, v, u, scale)
    if r.shape[2] != v.shape[2]:
        dr, dk = summed((dr, dk), r.shape[2], (r.dtype, k.dtype))
    return dr, dk, dv, du.sum(0).to(u.dtype)
