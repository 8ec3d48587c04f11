"""Device helpers of `precondition_kernel`: where a program's span lies, and what a tile of tokens brings."""

from __future__ import annotations

import triton
import triton.language as tl


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
def place_of(H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """(channels, block of them, head, document) of a program."""
    NK: tl.constexpr = (K + BK - 1) // BK
    block = tl.program_id(0) % NK
    head = tl.program_id(0) // NK % H
    return block * BK + tl.arange(0, BK), block, head, (tl.program_id(0) // (NK * H)).to(tl.int64)


@triton.jit
def span_of(n, C: tl.constexpr):
    """(first tile, end) of this program's span of a document of n tokens."""
    count = tl.cdiv(n, C)
    size = tl.cdiv(count, tl.num_programs(1))
    first = tl.minimum(tl.program_id(1) * size, count)
    return first, tl.minimum(first + size, count)


@triton.jit
def span_row(p, span, head, H: tl.constexpr):
    """The row of a document's span among ``[N, spans, H]``."""
    return (p * tl.num_programs(1) + span) * H + head


@triton.jit
def keys_of_tile(
    k, h, alpha, start, i, n, head, d, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr
):
    """(tokens, which of their channels are there, G, its last, α, k) of tile i."""
    t = tl.arange(0, C)
    live = t < n - i * C
    both = live[:, None] & (d < K)[None, :]
    token = start + i * C + t
    G = tl.cumsum(tl.load(h + token * H + head, live, other=0.0).to(tl.float32) * 1.4426950408889634, 0)
    weight = tl.load(alpha + token * H + head, live, other=0.0).to(tl.float32)
    y = tl.load(k + (token * HK + head // (H // HK))[:, None] * K + d[None, :], both, other=0.0).to(tl.float32)
    return token, both, G, tl.sum(tl.where(t == C - 1, G, 0.0), 0), weight, y


@triton.jit
def factor(a, center, rate, eps):
    """(k̂ / k, its share of r's gradient, a + ε) of a tile's a."""
    r = tl.log(a + eps) - center
    s = 1.0 / (1.0 + tl.abs(r))
    return tl.exp(-rate * r * s), -rate * s * s, a + eps


@triton.jit
def tile_back(
    dwritten, starts, tile, token, both, G, weight, y, head, d, mid, rate, eps, H: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """(dk̂, a, x, k̂ / k, dr, da) of a tile."""
    t = tl.arange(0, C)
    A = tl.load(starts + (tile * H + head) * K + d, d < K, other=0.0)
    z = tl.load(dwritten + (token * H + head)[:, None] * K + d[None, :], both, other=0.0).to(tl.float32)
    x = weight[:, None] * y * y
    W = tl.exp2(tl.where(t[:, None] >= t[None, :], G[:, None] - G[None, :], float("-inf")))
    a = tl.dot(W, x, input_precision="tf32x3") + tl.exp2(G)[:, None] * A[None, :]
    f, slope, q = factor(a, mid, rate, eps)
    dr = z * y * f * slope
    return z, a, x, f, dr, dr / q
