"""The kernels of `precondition`: a program has some channels of one head of one document and goes over its tokens.

Within a tile of C tokens with A before it, G the running sum of h, W_ts = e^{G_t−G_s} (s ≤ t) and x = α k²:

    a = W x + e^G A,        A ← e^{G_C} A + Σ e^{G_C−G} x

With dr = −rate · dk̂ k f / (1 + |r|)², da = dr / (a + ε) and R the gradient of the A behind the tile:

    D = Wᵀ da + e^{G_C−G} R,        dk = dk̂ f + 2 α k D,    dα = Σ D k²,    dh = Σ D (a − x),    dcenter = −Σ dr
    R ← e^{G_C} R + Σ e^G da

A document's tiles are spans side by side: what a span makes of A (or of R) is found first, in a kernel of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fused.precondition_tiles import (
    factor,
    keys_of_tile,
    place_of,
    span_of,
    span_row,
    tile_back,
    tokens_of,
)
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv, width

CHANNELS, WARPS = 32, 4
"""Of a program: channels know nothing of each other, and many programs fill the GPU."""
SPANS, SHORTEST = 16, 4
"""Spans of a document, at most, and tiles of one, at least."""


def unsupported(k: Tensor, *others: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    wide = [x.dtype for x in (k, *others) if x.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    return f"dtype {wide[0]}" if wide else "" if k.numel() else "no tokens"


@triton.jit(do_not_specialize=("T",))
def spans_kernel(
    k, h, alpha, cu, sums, decays, T, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What a span adds to A, and what it leaves of it (a logarithm)."""
    d, block, head, p = place_of(H, K, BK)
    start, n, _tile = tokens_of(cu, p, T, C, PACKED)
    A = tl.zeros([BK], tl.float32)
    left = 0.0
    first, end = span_of(n, C)
    for i in range(first, end):
        _token, _both, G, total, weight, y = keys_of_tile(k, h, alpha, start, i, n, head, d, H, HK, K, C)
        A = tl.exp2(total) * A + tl.sum((tl.exp2(total - G) * weight)[:, None] * y * y, 0)
        left += total
    row = span_row(p, tl.program_id(1), head, H)
    tl.store(sums + row * K + d, A, d < K)
    tl.store(decays + row, left, block == 0)


@triton.jit(do_not_specialize=("T",))
def precondition_kernel(
    k, h, alpha, center, A0, cu, sums, decays, written, final, starts, T, rate, eps, H: tl.constexpr,
    HK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """k̂ of one head of one span, BK channels; A behind the document, and before each tile."""
    d, _block, head, p = place_of(H, K, BK)
    start, n, tile = tokens_of(cu, p, T, C, PACKED)
    t = tl.arange(0, C)
    inside = d < K
    mid = tl.load(center + head).to(tl.float32)
    A = tl.zeros([BK], tl.float32)
    if HAS_STATE:
        A += tl.load(A0 + (p * H + head) * K + d, inside, other=0.0).to(tl.float32)
    for s in range(tl.program_id(1)):
        row = span_row(p, s, head, H)
        A = tl.exp2(tl.load(decays + row)) * A + tl.load(sums + row * K + d, inside, other=0.0)
    first, end = span_of(n, C)
    for i in range(first, end):
        tl.store(starts + ((tile + i) * H + head) * K + d, A, inside)
        token, both, G, total, weight, y = keys_of_tile(k, h, alpha, start, i, n, head, d, H, HK, K, C)
        x = weight[:, None] * y * y
        W = tl.exp2(tl.where(t[:, None] >= t[None, :], G[:, None] - G[None, :], float("-inf")))
        a = tl.dot(W, x, input_precision="tf32x3") + tl.exp2(G)[:, None] * A[None, :]
        f, _slope, _q = factor(a, mid, rate, eps)
        into = (token * H + head)[:, None] * K + d[None, :]
        tl.store(written + into, (y * f).to(written.dtype.element_ty), both)
        A = tl.exp2(total) * A + tl.sum(tl.exp2(total - G)[:, None] * x, 0)
    last = tl.program_id(1) == tl.num_programs(1) - 1
    tl.store(final + (p * H + head) * K + d, A, inside & last)


@triton.jit(do_not_specialize=("T",))
def spans_backward_kernel(
    dwritten, k, h, alpha, center, starts, cu, sums, decays, T, rate, eps, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What a span adds to R, and what it leaves of it (a logarithm)."""
    d, block, head, p = place_of(H, K, BK)
    start, n, tile = tokens_of(cu, p, T, C, PACKED)
    mid = tl.load(center + head).to(tl.float32)
    R = tl.zeros([BK], tl.float32)
    left = 0.0
    first, end = span_of(n, C)
    for j in range(first, end):
        i = first + end - 1 - j
        token, both, G, total, weight, y = keys_of_tile(k, h, alpha, start, i, n, head, d, H, HK, K, C)
        _z, _a, _x, _f, _dr, da = tile_back(
            dwritten, starts, tile + i, token, both, G, weight, y, head, d, mid, rate, eps, H, K, C
        )
        R = tl.exp2(total) * R + tl.sum(tl.exp2(G)[:, None] * da, 0)
        left += total
    row = span_row(p, tl.program_id(1), head, H)
    tl.store(sums + row * K + d, R, d < K)
    tl.store(decays + row, left, block == 0)


@triton.jit(do_not_specialize=("T", "rows", "N"))
def precondition_backward_kernel(
    dwritten, dfinal, k, h, alpha, center, starts, cu, sums, decays, dk, dh, dalpha, dcenter, dA0, T, rows, N, rate,
    eps, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of a span, right to left: dk by value head, dA0, and by block of channels dh, dα [NK, rows, H] and
    dcenter [NK, N, spans, H]."""
    d, block, head, p = place_of(H, K, BK)
    start, n, tile = tokens_of(cu, p, T, C, PACKED)
    t = tl.arange(0, C)
    inside = d < K
    mid = tl.load(center + head).to(tl.float32)
    R = tl.zeros([BK], tl.float32)
    if HAS_FINAL:
        R += tl.load(dfinal + (p * H + head) * K + d, inside, other=0.0).to(tl.float32)
    for s in range(tl.num_programs(1) - 1 - tl.program_id(1)):
        row = span_row(p, tl.num_programs(1) - 1 - s, head, H)
        R = tl.exp2(tl.load(decays + row)) * R + tl.load(sums + row * K + d, inside, other=0.0)
    to_center = tl.zeros([BK], tl.float32)
    first, end = span_of(n, C)
    for j in range(first, end):
        i = first + end - 1 - j
        token, both, G, total, weight, y = keys_of_tile(k, h, alpha, start, i, n, head, d, H, HK, K, C)
        z, a, x, f, dr, da = tile_back(
            dwritten, starts, tile + i, token, both, G, weight, y, head, d, mid, rate, eps, H, K, C
        )
        back = tl.exp2(tl.where(t[:, None] <= t[None, :], G[None, :] - G[:, None], float("-inf")))
        D = tl.dot(back, da, input_precision="tf32x3") + tl.exp2(total - G)[:, None] * R[None, :]
        into = (token * H + head)[:, None] * K + d[None, :]
        tl.store(dk + into, (z * f + 2 * weight[:, None] * y * D).to(dk.dtype.element_ty), both)
        part = (block.to(tl.int64) * rows + token) * H + head
        live = t < n - i * C
        tl.store(dh + part, tl.sum(tl.where(both, D * (a - x), 0.0), 1), live)
        tl.store(dalpha + part, tl.sum(D * y * y, 1), live)
        to_center -= tl.sum(dr, 0)
        R = tl.exp2(total) * R + tl.sum(tl.exp2(G)[:, None] * da, 0)
    tl.store(dA0 + (p * H + head) * K + d, R, inside & (tl.program_id(1) == 0))
    row = span_row(p, tl.program_id(1), head, H)
    tl.store(dcenter + block.to(tl.int64) * N * tl.num_programs(1) * H + row, tl.sum(to_center, 0))


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
    how, spans = _constants(k, H, cu, tokens), _spans(T if cu is None else T // N, tokens)
    sums, decays = (k.new_empty(N, spans, H, *more, dtype=torch.float32) for more in ((K,), ()))
    grid = N * H * cdiv(K, how["BK"]), spans
    if spans > 1:
        launch(spans_kernel, grid, *filled(k, h, alpha, cu), sums, decays, T, **how)
    launch(
        precondition_kernel, grid, *filled(k, h, alpha, center, A, cu), sums, decays, written, final, starts, T, rate,
        eps, **how, HAS_STATE=A is not None,
    )  # fmt: skip
    return written, final, starts


def _spans(T: int, tokens: int) -> int:
    """Spans of each document of, on average, T tokens."""
    return max(1, min(SPANS, T // (tokens * SHORTEST)))


@replayed(8)
def _gradients(
    dwritten: Tensor, dfinal: Tensor | None, k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, starts: Tensor,
    cu: Tensor | None, rate: float, eps: float, tokens: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dk by value head, dh, dα and dcenter by block of channels, and dA of the states that enter."""
    (B, T, _, K), H = k.shape, h.shape[2]
    N = B if cu is None else cu.shape[0] - 1
    how, spans = _constants(k, H, cu, tokens), _spans(T if cu is None else T // N, tokens)
    blocks = cdiv(K, how["BK"])
    dk = torch.empty_like(dwritten)
    dh, dalpha = (k.new_empty(blocks, B, T, H, dtype=torch.float32) for _ in range(2))
    dcenter, dA = k.new_empty(blocks, N * spans, H, dtype=torch.float32), k.new_empty(N, H, K, dtype=torch.float32)
    sums, decays = (k.new_empty(N, spans, H, *more, dtype=torch.float32) for more in ((K,), ()))
    grid = N * H * blocks, spans
    if spans > 1:
        given = filled(dwritten, k, h, alpha, center, starts, cu)
        launch(spans_backward_kernel, grid, *given, sums, decays, T, rate, eps, **how)
    launch(
        precondition_backward_kernel, grid, *filled(dwritten, dfinal, k, h, alpha, center, starts, cu), sums, decays,
        dk, dh, dalpha, dcenter, dA, T, B * T, N, rate, eps, **how, HAS_FINAL=dfinal is not None,
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
