"""What chunks compute before a state arrives, under delta writes with a scalar decay or none (see `inverse`)."""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import PRODUCTS
from ring_la.kernels.triton.gates import chunk_factors
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.inverse import invert
from ring_la.kernels.wy.saved import ChunkProducts, SavedProducts


@triton.jit
def put_bound(at, G, x, t, C: tl.constexpr):
    """Store log2 of what the norm of a chunk's transition Π e^{g_t} (I − β_t k_t k_tᵀ) is at most; the diagonal of
    x is β |k|². Of a token that lets the state grow, |1 − β |k|²| − 1 is counted, no less than its logarithm."""
    growth = tl.where(t[:, None] == t[None, :], tl.maximum(tl.abs(1 - x) - 1, 0.0), 0.0)
    tl.store(at + t * 0, G + tl.sum(growth) * 1.4426950408889634, t == C - 1)


@triton.jit(do_not_specialize=SIZES)
def plain_products_kernel(
    q, k, r, g, beta, F, bounds, A, M, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr, ERASE: tl.constexpr,
    BOUNDED: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """A_ts = scale · e^{G_t−G_s} q_t·k_s (s ≤ t) and M − I [B, T, H, C] of every chunk, for a scalar decay or none; F:
    its `chunk_factors`; ERASE: r [B, T, H, K] reads the state in k's place; BOUNDED: also `put_bound`'s, [B, H, NC]."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    f = F + entry(b, s, h, NC, H) * (4 * C)
    G, be = chunk_factors(g, beta, f, b.to(tl.int64) * T + start, t, n, h, H, C, GATED, STATIC)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        y = tile(k_, t, n, d, HK * K, K)
        a = tl.dot(tile(q_, t, n, d, HK * K, K), tl.trans(y), a, input_precision=PREC)
        x = tile(head(r, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
        L = tl.dot(x, tl.trans(y), L, input_precision=PREC)
    if GATED:
        decay = tl.exp2(tl.where(t[:, None] >= t[None, :], G[:, None] - G[None, :], float("-inf")))
        a *= decay
        L *= decay
    a = tl.where(t[:, None] >= t[None, :], a * scale, 0.0)
    put(head(A, b, start, h, T, H, H, C), a, t, n, t, H * C, C)
    L *= be[:, None]
    if BOUNDED:
        put_bound(bounds + (b.to(tl.int64) * H + h) * NC + s, G, L, t, C)
    L = tl.where(t[:, None] > t[None, :], L, 0.0)
    put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


def scalar_products(plan: SpanPlan, inputs: Inputs, bounded: bool) -> ChunkProducts:
    """Pairs and inverse of every chunk; `bounded`: and how much of a state it lets through at most."""
    q, k, _, g, beta, reads, _ = inputs
    (B, T, H, HK, K, _), gated, how = plan.sizes, plan.rule.decay == "scalar", plan.pick(PRODUCTS)
    erase = plan.rule.write == "erase"
    pairs, inverse, factors = plan.tokens(plan.chunk), plan.tokens(plan.chunk), plan.factors()
    bounds = plan.new(B, H, plan.chunk_count) if gated and bounded and not erase else None
    launch(
        plain_products_kernel, (plan.chunk_count, plan.rows),
        *filled(q, k, reads, g, beta, factors, bounds, pairs, inverse),
        plan.chunks.table, T, plan.chunk_count, plan.scale, H=H, HK=HK, K=K,
        BK=min(how.block, width(K)), C=plan.chunk, GATED=gated, STATIC=plan.by_head, ERASE=erase,
        BOUNDED=bounds is not None, PREC=plan.precision, VARLEN=plan.packed, **how.options,
    )  # fmt: skip
    return as_they_are(inputs, SavedProducts(factors=factors, pairs=pairs, inverse=inverse, bounds=bounds))


def as_they_are(inputs: Inputs, saved: SavedProducts) -> ChunkProducts:
    """Without a decay per key channel the passes read q and k as they came."""
    return ChunkProducts(inputs.q, inputs.k if inputs.a is None else inputs.a, inputs.k, None, saved)
