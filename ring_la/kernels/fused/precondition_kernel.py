"""The kernels of `precondition`: a program has some channels of one head of one document and goes over its tokens.

Within a tile of C tokens with A before it, G the running sum of h, W_ts = e^{G_t−G_s} (s ≤ t) and x = α k²:

    a = W x + e^G A,        A ← e^{G_C} A + Σ e^{G_C−G} x

With dr = −rate · dk̂ k f / (1 + |r|)², da = dr / (a + ε) and R the gradient of the A behind the tile:

    D = Wᵀ da + e^{G_C−G} R,        dk = dk̂ f + 2 α k D,    dα = Σ D k²,    dh = Σ D (a − x),    dcenter = −Σ dr
    R ← e^{G_C} R + Σ e^G da
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

CHANNELS, WARPS = 32, 4
"""Of a program: channels know nothing of each other, and many programs fill the GPU."""


def unsupported(k: Tensor, *others: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    wide = [x.dtype for x in (k, *others) if x.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    return f"dtype {wide[0]}" if wide else "" if k.numel() else "no tokens"


@triton.jit
def tokens_of(cu, p, T, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token of all B · T, tokens, first tile) of document p."""
    if PACKED:
        start = tl.load(cu + p).to(tl.int64)
        n = tl.load(cu + p + 1).to(tl.int64) - start
        tile = start // C + p
    else:
        start = p * T
        n = p * 0 + T
        tile = p * ((T + C - 1) // C)
    return start, n, tile


@triton.jit
def factor(a, center, rate, eps):
    """(k̂ / k, its share of r's gradient, a + ε) of a tile's a."""
    r = tl.log(a + eps) - center
    s = 1.0 / (1.0 + tl.abs(r))
    return tl.exp(-rate * r * s), -rate * s * s, a + eps


@triton.jit(do_not_specialize=("T",))
def precondition_kernel(
    k, h, alpha, center, A0, cu, written, final, starts, T, rate, eps, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """k̂ of one head of one document, BK channels; A behind it, and before each tile."""
    NK: tl.constexpr = (K + BK - 1) // BK
    d = tl.program_id(0) % NK * BK + tl.arange(0, BK)
    head = tl.program_id(0) // NK % H
    p = (tl.program_id(0) // (NK * H)).to(tl.int64)
    start, n, tile = tokens_of(cu, p, T, C, PACKED)
    t = tl.arange(0, C)
    inside = d < K
    mid = tl.load(center + head).to(tl.float32)
    A = tl.zeros([BK], tl.float32)
    if HAS_STATE:
        A += tl.load(A0 + (p * H + head) * K + d, inside, other=0.0).to(tl.float32)
    for i in range(0, tl.cdiv(n, C)):
        live = t < n - i * C
        token = start + i * C + t
        tl.store(starts + ((tile + i) * H + head) * K + d, A, inside)
        G = tl.cumsum(tl.load(h + token * H + head, live, other=0.0).to(tl.float32) * 1.4426950408889634, 0)
        weight = tl.load(alpha + token * H + head, live, other=0.0).to(tl.float32)
        at = (token * HK + head // (H // HK))[:, None] * K + d[None, :]
        y = tl.load(k + at, live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total = tl.sum(tl.where(t == C - 1, G, 0.0), 0)
        x = weight[:, None] * y * y
        W = tl.exp2(tl.where(t[:, None] >= t[None, :], G[:, None] - G[None, :], float("-inf")))
        a = tl.dot(W, x, input_precision="tf32x3") + tl.exp2(G)[:, None] * A[None, :]
        f, _, _ = factor(a, mid, rate, eps)
        into = (token * H + head)[:, None] * K + d[None, :]
        tl.store(written + into, (y * f).to(written.dtype.element_ty), live[:, None] & inside[None, :])
        A = tl.exp2(total) * A + tl.sum(tl.exp2(total - G)[:, None] * x, 0)
    tl.store(final + (p * H + head) * K + d, A, inside)


@triton.jit(do_not_specialize=("T", "rows", "N"))
def precondition_backward_kernel(
    dwritten, dfinal, k, h, alpha, center, starts, cu, dk, dh, dalpha, dcenter, dA0, T, rows, N, rate, eps,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients, right to left: dk by value head, dA0, and by block of channels dh, dα [NK, rows, H] and dcenter
    [NK, N, H]."""
    NK: tl.constexpr = (K + BK - 1) // BK
    block = tl.program_id(0) % NK
    d = block * BK + tl.arange(0, BK)
    head = tl.program_id(0) // NK % H
    p = (tl.program_id(0) // (NK * H)).to(tl.int64)
    start, n, tile = tokens_of(cu, p, T, C, PACKED)
    t = tl.arange(0, C)
    inside = d < K
    mid = tl.load(center + head).to(tl.float32)
    R = tl.zeros([BK], tl.float32)
    if HAS_FINAL:
        R += tl.load(dfinal + (p * H + head) * K + d, inside, other=0.0).to(tl.float32)
    to_center = tl.zeros([BK], tl.float32)
    count = tl.cdiv(n, C)
    for j in range(0, count):
        i = count - 1 - j
        live = t < n - i * C
        both = live[:, None] & inside[None, :]
        token = start + i * C + t
        A = tl.load(starts + ((tile + i) * H + head) * K + d, inside, other=0.0)
        G = tl.cumsum(tl.load(h + token * H + head, live, other=0.0).to(tl.float32) * 1.4426950408889634, 0)
        weight = tl.load(alpha + token * H + head, live, other=0.0).to(tl.float32)
        at = (token * HK + head // (H // HK))[:, None] * K + d[None, :]
        y = tl.load(k + at, both, other=0.0).to(tl.float32)
        into = (token * H + head)[:, None] * K + d[None, :]
        z = tl.load(dwritten + into, both, other=0.0).to(tl.float32)
        total = tl.sum(tl.where(t == C - 1, G, 0.0), 0)
        x = weight[:, None] * y * y
        W = tl.exp2(tl.where(t[:, None] >= t[None, :], G[:, None] - G[None, :], float("-inf")))
        a = tl.dot(W, x, input_precision="tf32x3") + tl.exp2(G)[:, None] * A[None, :]
        f, slope, q = factor(a, mid, rate, eps)
        dr = z * y * f * slope
        da = dr / q
        back = tl.exp2(tl.where(t[:, None] <= t[None, :], G[None, :] - G[:, None], float("-inf")))
        D = tl.dot(back, da, input_precision="tf32x3") + tl.exp2(total - G)[:, None] * R[None, :]
        tl.store(dk + into, (z * f + 2 * weight[:, None] * y * D).to(dk.dtype.element_ty), both)
        part = (block.to(tl.int64) * rows + token) * H + head
        tl.store(dh + part, tl.sum(tl.where(both, D * (a - x), 0.0), 1), live)
        tl.store(dalpha + part, tl.sum(D * y * y, 1), live)
        to_center -= tl.sum(dr, 0)
        R = tl.exp2(total) * R + tl.sum(tl.exp2(G)[:, None] * da, 0)
    tl.store(dA0 + (p * H + head) * K + d, R, inside)
    tl.store(dcenter + (block.to(tl.int64) * N + p) * H + head, tl.sum(to_center, 0))


def _constants(k: Tensor, H: int, cu: Tensor | None, tokens: int) -> dict[str, Any]:
    K = k.shape[3]
    block = min(CHANNELS, width(K))
    return dict(H=H, HK=k.shape[2], K=K, BK=block, C=tokens, PACKED=cu is not None, num_warps=WARPS)


@replayed(6)
def forward(
    k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, A: Tensor | None, cu: Tensor | None, rate: float, eps: float,
    tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """k̂ ``[B, T, H, K]``, A after each document ``[N, H, K]``, and before each tile of so many tokens, in order."""
    (B, T, _, K), H = k.shape, h.shape[2]
    N = B if cu is None else cu.shape[0] - 1
    tiles = B * cdiv(T, tokens) if cu is None else T // tokens + N
    written = k.new_empty(B, T, H, K)
    final, starts = (k.new_empty(n, H, K, dtype=torch.float32) for n in (N, tiles))
    how = _constants(k, H, cu, tokens)
    launch(
        precondition_kernel, (N * H * cdiv(K, how["BK"]),), *filled(k, h, alpha, center, A, cu), written, final, starts,
        T, rate, eps, **how, HAS_STATE=A is not None,
    )  # fmt: skip
    return written, final, starts


@replayed(8)
def _gradients(
    dwritten: Tensor, dfinal: Tensor | None, k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, starts: Tensor,
    cu: Tensor | None, rate: float, eps: float, tokens: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dk by value head, dh, dα and dcenter by block of channels, and dA of the states that enter."""
    (B, T, _, K), H = k.shape, h.shape[2]
    N = B if cu is None else cu.shape[0] - 1
    how = _constants(k, H, cu, tokens)
    blocks = cdiv(K, how["BK"])
    dk = torch.empty_like(dwritten)
    dh, dalpha = (k.new_empty(blocks, B, T, H, dtype=torch.float32) for _ in range(2))
    dcenter, dA = k.new_empty(blocks, N, H, dtype=torch.float32), k.new_empty(N, H, K, dtype=torch.float32)
    launch(
        precondition_backward_kernel, (N * H * blocks,),
        *filled(dwritten, dfinal, k, h, alpha, center, starts, cu), dk, dh, dalpha, dcenter, dA, T, B * T, N, rate, eps,
        **how, HAS_FINAL=dfinal is not None,
    )  # fmt: skip
    return dk, dh, dalpha, dcenter, dA


def backward(
    dwritten: Tensor, dfinal: Tensor | None, k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, starts: Tensor,
    cu: Tensor | None, rate: float, eps: float, tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of k, h, alpha, center and of A before each document, the last four in fp32."""
    given = dwritten.to(k.dtype), dfinal, k, h, alpha, center, starts, cu
    dk, dh, dalpha, dcenter, dA = _gradients(*given, rate, eps, tokens)
    if k.shape[2] != h.shape[2]:
        dk = dk.unflatten(2, (k.shape[2], -1)).sum(3)
    return dk, dh.sum(0), dalpha.sum(0), dcenter.sum((0, 1)), dA
