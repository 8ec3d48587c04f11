"""What chunks compute before a state arrives, under a decay per key channel (see `levels` and `inverse`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import PRODUCTS_DIAGONAL
from ring_la.kernels.triton.gates import chunk_factors, running
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.inverse import invert
from ring_la.kernels.wy.levels import (
    gates_at,
    level_count,
    level_weights,
    limit,
    nearest,
    reach,
    row_of,
)
from ring_la.kernels.wy.saved import ChunkProducts, SavedProducts, fine


@triton.jit
def put_square(A, Ar, a, b, h, start, rows, t, n, T, H: tl.constexpr, C: tl.constexpr, FINE: tl.constexpr):
    """Store those rows of a chunk's [C, C]; FINE: what its rounding leaves too."""
    put(head(A, b, start, h, T, H, H, C), a, rows, n, t, H * C, C)
    if FINE:
        put(head(Ar, b, start, h, T, H, H, C), a - a.to(A.dtype.element_ty).to(tl.float32), rows, n, t, H * C, C)


@triton.jit(do_not_specialize=SIZES)
def products_kernel(
    q, k, r, g_, beta, F, G, A, Ar, M, qr_, kr_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, DELTA: tl.constexpr,
    ERASE: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """A_ts = scale · Σ_d q_td k_sd e^{G_td−G_sd} (s ≤ t) and, for the delta rule, M − I; a decay per key channel.

    Also G (in units of ln 2) and what the passes read and write: qr = e^G q, kr = e^G k (delta), kw = e^{G_C−G} k, all
    [B, T, H, K], and β's row of F. One reference serves the whole chunk: low [B, NC, H] says LEVELS where it may, else
    −1, and what is computed here is then replaced by `levels_kernel`. ERASE: r [B, T, H, K] reads in k's place.
    """
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    at = entry(b, start, h, T, H) * K
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    spread = 0.0
    half = tl.minimum(C // 2, n - 1)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        g = running(tile(g_ + at, t, n, d, H * K, K), C, PREC)  # past the chunk's end the sum stays what it was
        put(G + at, g, t, n, d, H * K, K)
        x = tile(q_, t, n, d, HK * K, K).to(k.dtype.element_ty)  # see `plan.query_dtype`
        y = tile(k_, t, n, d, HK * K, K)
        own += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
        ref = row_of(g, t, half)
        rest = row_of(g, t, C - 1) - ref
        g -= ref[None, :]
        spread = tl.maximum(spread, tl.max(tl.max(tl.abs(g), 1), 0))
        ref = tl.exp2(ref)[None, :]
        up = tl.exp2(g)
        yw = y * tl.exp2(-g)
        put(kw_ + at, yw * tl.exp2(rest)[None, :], t, n, d, H * K, K)
        yw = tl.trans(nearest(yw, PREC))
        xw = x * up
        put(qr_ + at, xw * ref, t, n, d, H * K, K)
        a = tl.dot(nearest(xw, PREC), yw, a, input_precision=PREC)
        if DELTA:
            z = tile(head(r, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
            xw = z * up
            put(kr_ + at, xw * ref, t, n, d, H * K, K)
            L = tl.dot(nearest(xw, PREC), yw, L, input_precision=PREC)
    tl.store(low_ + entry(b, s, h, NC, H), tl.where(spread <= LIMIT, LEVELS, -1))
    a = tl.where(t[:, None] > t[None, :], a, 0.0) + tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
    put_square(A, Ar, a * scale, b, h, start, t, t, n, T, H, C, FINE)
    if DELTA:
        f = F + entry(b, s, h, NC, H) * (4 * C)
        _, be = chunk_factors(g_, beta, f, b.to(tl.int64) * T + start, t, n, h, H, C, False, False)
        L = tl.where(t[:, None] > t[None, :], L * be[:, None], 0.0)
        put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


@triton.jit(do_not_specialize=SIZES)
def levels_kernel(
    q, k, r, F, G, A, Ar, M, qr_, kr_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, ERASE: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What `products_kernel` computes, level by level, for the chunks it left (low < 0); low ← their `reach`."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low_ += entry(b, s, h, NC, H)
    if tl.load(low_) >= 0:
        return
    t = tl.arange(0, C)
    q_ = head(q, b, start, h, T, HK, H, K)
    k_ = head(k, b, start, h, T, HK, H, K)
    at = entry(b, start, h, T, H) * K
    G_ = G + at
    dt = k.dtype.element_ty
    a = tl.zeros([C, C], tl.float32)
    L = tl.zeros([C, C], tl.float32)
    least = LEVELS
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        x = tile(q_, t, n, d, HK * K, K).to(k.dtype.element_ty)  # see `plan.query_dtype`
        y = tile(k_, t, n, d, HK * K, K)
        g = gates_at(G_, tl.minimum(t, n - 1), d, H * K, K)
        gc = tl.load(G_ + (n - 1) * (H * K) + d, d < K, other=0.0)
        own = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
        a += tl.where(t[:, None] == t[None, :], own[:, None], 0.0)
        put(kw_ + at, y * tl.exp2(gc[None, :] - g), t, n, d, H * K, K)
        up = tl.exp2(g)
        put(qr_ + at, x * up, t, n, d, H * K, K)
        z = tile(head(r, b, start, h, T, H, H, K), t, n, d, H * K, K) if ERASE else y
        if DELTA:
            put(kr_ + at, z * up, t, n, d, H * K, K)
        low = reach(g, G_, t, n, d, H * K, K, LEVELS, LIMIT)
        least = tl.minimum(least, low)
        for i in range(low - 1, LEVELS):
            up, down, mask = level_weights(g, G_, t, n, d, low, i, H * K, K)
            yw = tl.trans((y * down).to(dt))
            a += tl.where(mask, tl.dot((x * up).to(dt), yw, input_precision=PREC), 0.0)
            if DELTA:
                L += tl.where(mask, tl.dot((z * up).to(dt), yw, input_precision=PREC), 0.0)
    tl.store(low_, least)
    put_square(A, Ar, a * scale, b, h, start, t, t, n, T, H, C, FINE)
    if DELTA:
        be = tl.load(F + entry(b, s, h, NC, H) * (4 * C) + 3 * C + t)
        L = tl.where(t[:, None] > t[None, :], L * be[:, None], 0.0)
        put(head(M, b, start, h, T, H, H, C), invert(L, C, PREC), t, n, t, H * C, C)


class Launched(NamedTuple):
    """What launches fill, and what they take beside the inputs."""

    found: ChunkProducts
    out: tuple[Tensor | None, ...]
    where: tuple[Tensor | int | float | None, ...]
    grid: tuple[int, int]
    constants: dict[str, Any]


def launched(plan: SpanPlan, inputs: Inputs, rests: bool) -> Launched:
    """`rests`: also room for what A's rounding leaves."""
    (B, T, H, HK, K, _), how, delta = plan.sizes, plan.pick(PRODUCTS_DIAGONAL), plan.rule.write != "additive"
    pairs, rest = plan.tokens(plan.chunk), plan.tokens(plan.chunk) if rests else None
    saved = SavedProducts(
        factors=plan.factors() if delta else None, running=plan.new(*inputs.g.shape),
        low=plan.new(B, plan.chunk_count, H, dtype=torch.int32), pairs=pairs, pairs_rest=rest,
        inverse=plan.tokens(plan.chunk) if delta else None,
    )  # fmt: skip
    found = ChunkProducts(plan.tokens(K), plan.tokens(K) if delta else None, plan.tokens(K), None, saved)
    constants: dict[str, Any] = dict(
        H=H, HK=HK, K=K, BK=min(how.block, width(K)), C=plan.chunk, LEVELS=level_count(plan), LIMIT=limit(plan),
        DELTA=delta, ERASE=inputs.a is not None, FINE=rests, PREC=plan.precision, VARLEN=plan.packed,
    )  # fmt: skip
    out = saved.factors, saved.running, pairs, rest, saved.inverse, found.q, found.reads, found.writes, saved.low
    where, grid = (plan.chunks.table, T, plan.chunk_count, plan.scale), (plan.chunk_count, plan.rows)
    return Launched(found, out, where, grid, constants)


def diagonal_products(plan: SpanPlan, inputs: Inputs, alone: bool) -> ChunkProducts:
    """Of additive and delta writes: pairs, delta writes' inverse, and keys and queries weighed by the decay. `alone`:
    what an output takes, and no gradients do."""
    q, k, _, g, beta, reads, _ = inputs
    found, out, where, grid, constants = launched(plan, inputs, fine(plan) and not alone)
    options = plan.pick(PRODUCTS_DIAGONAL).options
    launch(products_kernel, grid, *filled(q, k, reads, g, beta, *out), *where, **constants, **options)
    launch(levels_kernel, grid, *filled(q, k, reads, *out), *where, **constants, num_warps=4, num_stages=1)
    return found
