"""The gradient of forgetting attention's sums on the side of keys, in fp32 (see `forgetting`).

    dc_j = −Σ_i p_ij (do_i·v_j − δ_i),       p_ij = e^{s_ij − lse_i},  δ_i = do_i·o_i − dlse_i

What kernels of attention give of a channel that rides with the keys is this, rounded to the dtype of k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.spans.table import cdiv, width

KEYS, QUERIES, WARPS, STAGES = 64, 64, 4, 2
"""Of a tile."""


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why this kernel cannot take a call, or an empty string."""
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return f"dtype {q.dtype}"
    if not q.numel() or not v.numel():
        return "no tokens"
    return "" if max(q.shape[-1], v.shape[-1]) <= 256 else "heads beyond 256"


@triton.jit(do_not_specialize=("T", "window"))
def sums_gradient_kernel(
    q, k, v, c, lse, do, delta, ends, out, T, scale, window, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """BN keys of one head: c, lse, δ and dc are [B, H, T], `ends` [T] says where each token's document ends."""
    first = tl.program_id(0) * BN
    row = tl.program_id(1).to(tl.int64)
    head = (row // H) * T * H + row % H
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    j = first + tl.arange(0, BN)
    keys = head + j.to(tl.int64) * H
    x = tl.load(k + keys[:, None] * K + d[None, :], (j < T)[:, None] & (d < K)[None, :], other=0.0)
    w = tl.load(v + keys[:, None] * V + e[None, :], (j < T)[:, None] & (e < V)[None, :], other=0.0)
    cj = tl.load(c + row * T + j, j < T, other=0.0)
    end = tl.load(ends + j, j < T, other=0) if PACKED else tl.where(j < T, T, 0)
    last = tl.max(end, 0)
    if WINDOW:
        last = tl.minimum(last, first + BN + window)
    total = tl.zeros([BN], tl.float32)
    for start in range(first // BM * BM, last, BM):
        i = start + tl.arange(0, BM)
        live = i < T
        queries = head + i.to(tl.int64) * H
        y = tl.load(q + queries[:, None] * K + d[None, :], live[:, None] & (d < K)[None, :], other=0.0)
        z = tl.load(do + queries[:, None] * V + e[None, :], live[:, None] & (e < V)[None, :], other=0.0)
        at = row * T + i
        s = tl.dot(y, tl.trans(x)) * scale + tl.load(c + at, live, other=0.0)[:, None] - cj[None, :]
        seen = live[:, None] & (i[:, None] >= j[None, :]) & (i[:, None] < end[None, :])
        if WINDOW:
            seen = seen & (i[:, None] - j[None, :] <= window)
        s -= tl.load(lse + at, live, other=0.0)[:, None]
        p = tl.exp2(tl.where(seen, s * 1.4426950408889634, float("-inf")))
        total += tl.sum(p * (tl.dot(z, tl.trans(w)) - tl.load(delta + at, live, other=0.0)[:, None]), 0)
    tl.store(out + row * T + j, -total, j < T)


def sums_gradient(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, lse: Tensor, do: Tensor, delta: Tensor, scale: float, window: int,
    cu: Tensor | None,
) -> Tensor:  # fmt: skip
    """dc ``[B, H, T]`` fp32, of q, k ``[B, T, H, K]``, v and do ``[B, T, H, V]``, c, lse and δ ``[B, H, T]``."""
    (B, T, H, K), V = q.shape, v.shape[3]
    q, k, v, do = (aligned(x) for x in (q, k, v, do.to(q.dtype)))
    c, lse, delta = (aligned(x.float()) for x in (c, lse, delta))
    out = torch.empty_like(c)
    ends = out
    if cu is not None:
        token = torch.arange(T, device=q.device)
        ends = cu[1:].to(torch.int32)[torch.searchsorted(cu[1:].contiguous(), token, right=True)].contiguous()
    launch(
        sums_gradient_kernel, (cdiv(T, KEYS), B * H), q, k, v, c, lse, do, delta, ends, out, T, scale, window, H=H, K=K,
        V=V, BK=width(K), BV=width(V), BM=QUERIES, BN=KEYS, PACKED=cu is not None, WINDOW=window >= 0,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
