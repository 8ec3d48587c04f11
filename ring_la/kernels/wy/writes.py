"""What chunks write to a state under a decay per key channel, where nobody reads it by keys (`other_side`)."""

from __future__ import annotations

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
from ring_la.kernels.wy.levels import level_count, limit, row_of
from ring_la.kernels.wy.saved import ChunkProducts, SavedProducts


@triton.jit(do_not_specialize=SIZES)
def writes_kernel(
    k, g_, G, kw_, low_, table, T, NC, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr, PREC: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """G in units of ln 2 and e^{G_C−G} k, [B, T, H, K]; low [B, NC, H] says LEVELS where one reference serves the whole
    chunk, else 0: pairs are then right by levels from the first on, whatever the gates."""
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    at = entry(b, start, h, T, H) * K
    spread = 0.0
    half = tl.minimum(C // 2, n - 1)
    for m in range(0, K, BK):
        d = m + tl.arange(0, BK)
        g = running(tile(g_ + at, t, n, d, H * K, K), C, PREC)  # past the chunk's end the sum stays what it was
        put(G + at, g, t, n, d, H * K, K)
        y = tile(head(k, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        put(kw_ + at, y * tl.exp2(row_of(g, t, C - 1)[None, :] - g), t, n, d, H * K, K)
        spread = tl.maximum(spread, tl.max(tl.max(tl.abs(g - row_of(g, t, half)[None, :]), 1), 0))
    tl.store(low_ + entry(b, s, h, NC, H), tl.where(spread <= LIMIT, LEVELS, 0))


def writes_alone(plan: SpanPlan, inputs: Inputs) -> ChunkProducts:
    """Of additive writes, what finds the states before chunks and the gradient of queries; nothing for q."""
    (B, T, H, HK, K, _), how = plan.sizes, plan.pick(PRODUCTS_DIAGONAL)
    low, writes = plan.new(B, plan.chunk_count, H, dtype=torch.int32), plan.tokens(K)
    saved = SavedProducts(running=plan.new(*inputs.g.shape), low=low)
    launch(
        writes_kernel, (plan.chunk_count, plan.rows), inputs.k, inputs.g, saved.running, writes, low,
        plan.chunks.table, T, plan.chunk_count, H=H, HK=HK, K=K, BK=min(how.block, width(K)), C=plan.chunk,
        LEVELS=level_count(plan), LIMIT=limit(plan), PREC=plan.precision, VARLEN=plan.packed, **how.options,
    )  # fmt: skip
    return ChunkProducts(writes, None, writes, None, saved)
