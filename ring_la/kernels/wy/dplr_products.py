"""Diagonal plus low rank, S_t = (D_t + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ: what its chunks compute before a state arrives.

With y_t = S_{t−1}ᵀ a_t the state obeys S_t = D_t S_{t−1} + b_t y_tᵀ + k_t v_tᵀ: additive, with two streams. Over a
chunk, G the running log-decay and a's reads at G' = G_{t−1}:

    Y = M (e^{G'} a S + L V),   M = (I − N)⁻¹,   N_ts = a_t·e^{G'_t−G_s} b_s,   L_ts = a_t·e^{G'_t−G_s} k_s    (s < t)
    O = scale · (e^G q S + A_b Y + A_k V),        A_ts = q_t·e^{G_t−G_s} (b_s or k_s)                          (s ≤ t)

(RWKV-7, Peng et al. 2025, arXiv:2503.14456, has this transition; the chunk form is the WY form's.) `forward` and
`backward` run it as the delta rule's U = Y with a second stream.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import launch
from ring_la.kernels.sizes import width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.spans.table import PRODUCTS_DIAGONAL
from ring_la.kernels.triton.gates import running
from ring_la.kernels.triton.tiles import SIZES, chunk_of, entry, head, put, tile
from ring_la.kernels.wy.diagonal_products import Launched
from ring_la.kernels.wy.inverse import invert
from ring_la.kernels.wy.levels import (
    direct_mask,
    gates_at,
    level_border,
    level_count,
    level_mask,
    limit,
    middle,
    nearest,
    reach,
    row_of,
)
from ring_la.kernels.wy.saved import ChunkProducts, SavedProducts


@triton.jit
def gates_before(g_, t, n, d, STRIDE: tl.constexpr, D: tl.constexpr):
    """G of the token before; 0 for the chunk's first."""
    before = gates_at(g_, tl.minimum(tl.maximum(t - 1, 0), n - 1), d, STRIDE, D)
    return tl.where((t == 0)[:, None], 0.0, before)


@triton.jit
def weights(g, gp, g_, t, n, d, low, i, STRIDE: tl.constexpr, D: tl.constexpr, LIMIT: tl.constexpr):
    """`level_weights` for q, for a (at the G before, gp) and for what is written, and the mask."""
    if i < low:  # the pairs that share their block's middle; a block's first token has none before it
        ref = gates_at(g_, middle(t, n, low), d, STRIDE, D)
        wq = tl.exp2(g - ref)
        wa = tl.exp2(tl.minimum(gp - ref, LIMIT))
        wk = tl.exp2(ref - g)
        mask = direct_mask(t, low)
    else:
        ref = gates_at(g_, level_border(t, n, i), d, STRIDE, D)
        wq = tl.exp2(-tl.abs(g - ref))
        wa = tl.exp2(-tl.abs(gp - ref))
        wk = wq
        mask = level_mask(t, i)
    return wq, wa, wk, mask


@triton.jit(do_not_specialize=SIZES)
def dplr_products_kernel(
    q, k, a, b, g_, G, Ab, Ak, L, M, qr_, ar_, bw_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """scale · A_b, scale · A_k, L and M − I of one chunk [B, T, H, C]; G, e^G q, e^{G'} a, e^{G_C−G} b and k
    [B, T, H, K]; low as in `products_kernel`."""
    s = tl.program_id(0)
    i_b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    at = entry(i_b, start, h, T, H) * K
    qb = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    own_b = tl.zeros([C], tl.float32)
    own_k = tl.zeros([C], tl.float32)
    spread = 0.0
    half = tl.minimum(C // 2, n - 1)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        gate = tile(g_ + at, t, n, d, H * K, K)
        g = running(gate, C, PREC)  # past the chunk's end the sum stays what it was
        put(G + at, g, t, n, d, H * K, K)
        ref = row_of(g, t, half)
        rest = tl.exp2(row_of(g, t, C - 1) - ref)[None, :]
        g -= ref[None, :]
        spread = tl.maximum(spread, tl.max(tl.max(tl.abs(g), 1), 0))
        before = g - gate.to(tl.float32) * 1.4426950408889634
        ref = tl.exp2(ref)[None, :]
        x = tile(head(q, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        y = tile(head(k, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        z = tile(b + at, t, n, d, H * K, K)
        xf = x.to(tl.float32)
        own_k += tl.sum(xf * y.to(tl.float32), 1)
        own_b += tl.sum(xf * z.to(tl.float32), 1)
        w = tl.exp2(-g)
        yw = y * w
        zw = z * w
        put(kw_ + at, yw * rest, t, n, d, H * K, K)
        put(bw_ + at, zw * rest, t, n, d, H * K, K)
        yw = tl.trans(nearest(yw, PREC))
        zw = tl.trans(nearest(zw, PREC))
        xw = xf * tl.exp2(g)
        put(qr_ + at, xw * ref, t, n, d, H * K, K)
        xw = nearest(xw, PREC)
        qk = tl.dot(xw, yw, qk, input_precision=PREC)
        qb = tl.dot(xw, zw, qb, input_precision=PREC)
        # the chunk's first token has none before it, and may be far from the reference
        first = (t == 0)[:, None]
        x = tile(a + at, t, n, d, H * K, K)
        xw = x * tl.where(first, 0.0, tl.exp2(tl.minimum(before, LIMIT)))
        put(ar_ + at, tl.where(first, x.to(tl.float32), xw * ref), t, n, d, H * K, K)
        xw = nearest(xw, PREC)
        ak = tl.dot(xw, yw, ak, input_precision=PREC)
        ab = tl.dot(xw, zw, ab, input_precision=PREC)
    tl.store(low_ + entry(i_b, s, h, NC, H), tl.where(spread <= LIMIT, LEVELS, -1))
    strict = t[:, None] > t[None, :]
    same = t[:, None] == t[None, :]
    qb = tl.where(strict, qb, tl.where(same, own_b[:, None], 0.0))
    qk = tl.where(strict, qk, tl.where(same, own_k[:, None], 0.0))
    put(head(Ab, i_b, start, h, T, H, H, C), qb * scale, t, n, t, H * C, C)
    put(head(Ak, i_b, start, h, T, H, H, C), qk * scale, t, n, t, H * C, C)
    put(head(L, i_b, start, h, T, H, H, C), tl.where(strict, ak, 0.0), t, n, t, H * C, C)
    put(head(M, i_b, start, h, T, H, H, C), invert(tl.where(strict, -ab, 0.0), C, PREC), t, n, t, H * C, C)


@triton.jit(do_not_specialize=SIZES)
def dplr_levels_kernel(
    q, k, a, b, G, Ab, Ak, L, M, qr_, ar_, bw_, kw_, low_, table, T, NC, scale, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr,
    PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """What `dplr_products_kernel` computes, level by level, for the chunks it left (low < 0); low ← their `reach`."""
    s = tl.program_id(0)
    i_b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    low_ += entry(i_b, s, h, NC, H)
    if tl.load(low_) >= 0:
        return
    t = tl.arange(0, C)
    dt = k.dtype.element_ty
    g_ = head(G, i_b, start, h, T, H, H, K)
    qb = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    same = t[:, None] == t[None, :]
    least = LEVELS
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        xq = tile(head(q, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        yk = tile(head(k, i_b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        xa = tile(head(a, i_b, start, h, T, H, H, K), t, n, d, H * K, K)
        yb = tile(head(b, i_b, start, h, T, H, H, K), t, n, d, H * K, K)
        g = gates_at(g_, tl.minimum(t, n - 1), d, H * K, K)
        gp = gates_before(g_, t, n, d, H * K, K)
        gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
        w = tl.exp2(gc[None, :] - g)
        put(head(qr_, i_b, start, h, T, H, H, K), xq * tl.exp2(g), t, n, d, H * K, K)
        put(head(ar_, i_b, start, h, T, H, H, K), xa * tl.exp2(gp), t, n, d, H * K, K)
        put(head(bw_, i_b, start, h, T, H, H, K), yb * w, t, n, d, H * K, K)
        put(head(kw_, i_b, start, h, T, H, H, K), yk * w, t, n, d, H * K, K)
        qk += tl.where(same, tl.sum(xq.to(tl.float32) * yk.to(tl.float32), 1)[:, None], 0.0)
        qb += tl.where(same, tl.sum(xq.to(tl.float32) * yb.to(tl.float32), 1)[:, None], 0.0)
        low = reach(g, g_, t, n, d, H * K, K, LEVELS, LIMIT)
        least = tl.minimum(least, low)
        for i in range(low - 1, LEVELS):
            wq, wa, wk, mask = weights(g, gp, g_, t, n, d, low, i, H * K, K, LIMIT)
            q_ = (xq * wq).to(dt)
            a_ = (xa * wa).to(dt)
            k_ = tl.trans((yk * wk).to(dt))
            b_ = tl.trans((yb * wk).to(dt))
            qk += tl.where(mask, tl.dot(q_, k_, input_precision=PREC), 0.0)
            qb += tl.where(mask, tl.dot(q_, b_, input_precision=PREC), 0.0)
            ak += tl.where(mask, tl.dot(a_, k_, input_precision=PREC), 0.0)
            ab += tl.where(mask, tl.dot(a_, b_, input_precision=PREC), 0.0)
    tl.store(low_, least)
    put(head(Ab, i_b, start, h, T, H, H, C), qb * scale, t, n, t, H * C, C)
    put(head(Ak, i_b, start, h, T, H, H, C), qk * scale, t, n, t, H * C, C)
    put(head(L, i_b, start, h, T, H, H, C), ak, t, n, t, H * C, C)
    put(head(M, i_b, start, h, T, H, H, C), invert(-ab, C, PREC), t, n, t, H * C, C)


def launched(plan: SpanPlan, inputs: Inputs) -> Launched:
    """What a launch fills and takes."""
    (B, T, H, HK, K, _), how = plan.sizes, plan.pick(PRODUCTS_DIAGONAL)
    pairs, value_pairs, value_reads, inverse = (plan.tokens(plan.chunk) for _ in range(4))
    saved = SavedProducts(
        running=plan.new(*inputs.g.shape), low=plan.new(B, plan.chunk_count, H, dtype=torch.int32), pairs=pairs,
        inverse=inverse, value_pairs=value_pairs, value_reads=value_reads,
    )  # fmt: skip
    first, second, third, fourth = (plan.tokens(K) for _ in range(4))
    found = ChunkProducts(first, second, third, fourth, saved)
    constants: dict[str, Any] = dict(
        H=H, HK=HK, K=K, BK=min(how.block, width(K)), C=plan.chunk, LEVELS=level_count(plan), LIMIT=limit(plan),
        PREC=plan.precision, VARLEN=plan.packed,
    )  # fmt: skip
    out = (
        saved.running, pairs, value_pairs, value_reads, inverse, found.q, found.reads, found.writes,
        found.value_writes, saved.low,
    )  # fmt: skip
    where, grid = (plan.chunks.table, T, plan.chunk_count, plan.scale), (plan.chunk_count, plan.rows)
    return Launched(found, out, where, grid, constants)


def dplr_products(plan: SpanPlan, inputs: Inputs) -> ChunkProducts:
    """Pairs and inverse of every chunk, and a, b, keys and queries weighed by the decay."""
    q, k, _, g, _, a, b = inputs
    found, out, where, grid, constants = launched(plan, inputs)
    options = plan.pick(PRODUCTS_DIAGONAL).options
    launch(dplr_products_kernel, grid, q, k, a, b, g, *out, *where, **constants, **options)
    launch(dplr_levels_kernel, grid, q, k, a, b, *out, *where, **constants, num_warps=4, num_stages=1)
    return found
