"""Keys and queries weighed by a decay per key channel, again: cheaper than much memory from forward to backward."""

from __future__ import annotations

import triton
import triton.language as tl

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import width
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.triton.tiles import SIZES, chunk_of, head, put, tile
from ring_la.kernels.wy.saved import ChunkProducts, SavedProducts


@triton.jit(do_not_specialize=SIZES)
def weigh_kernel(
    q, kr, kw, kv, G, qr_, kr_, kw_, kv_, table, T, H: tl.constexpr, HK: tl.constexpr, HR: tl.constexpr,
    HW: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, DPLR: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """What the passes read and write, again from G: e^G q, e^G kr (dplr: with the G before), e^{G_C−G} kw and kv.

    q (and kv) have HK heads, kr HR and kw HW.
    """
    s = tl.program_id(0)
    b, h, start, n = chunk_of(table, s, T, H, C, VARLEN)
    if n <= 0:
        return
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    g_ = head(G, b, start, h, T, H, H, K)
    g = tile(g_, t, n, d, H * K, K)
    gc = tl.load(g_ + (n - 1) * (H * K) + d, d < K, other=0.0)
    eg = tl.exp2(g)
    put(
        head(qr_, b, start, h, T, H, H, K),
        tile(head(q, b, start, h, T, HK, H, K), t, n, d, HK * K, K).to(kw.dtype.element_ty) * eg,
        t,
        n,
        d,
        H * K,
        K,
    )
    y = tile(head(kw, b, start, h, T, HW, H, K), t, n, d, HW * K, K)
    eg_c = tl.exp2(gc[None, :] - g)
    put(head(kw_, b, start, h, T, H, H, K), y * eg_c, t, n, d, H * K, K)
    if DELTA:
        x = tile(head(kr, b, start, h, T, HR, H, K), t, n, d, HR * K, K)
        put(head(kr_, b, start, h, T, H, H, K), x * eg, t, n, d, H * K, K)
    if DPLR:
        before = tl.load(
            g_ + (t[:, None] - 1) * (H * K) + d[None, :], ((t > 0) & (t < n))[:, None] & (d < K)[None, :], other=0.0
        )
        x = tile(head(kr, b, start, h, T, HR, H, K), t, n, d, HR * K, K)
        put(head(kr_, b, start, h, T, H, H, K), x * tl.exp2(before), t, n, d, H * K, K)
        y = tile(head(kv, b, start, h, T, HK, H, K), t, n, d, HK * K, K)
        put(head(kv_, b, start, h, T, H, H, K), y * eg_c, t, n, d, H * K, K)


def weighed_again(plan: SpanPlan, inputs: Inputs, saved: SavedProducts) -> ChunkProducts:
    """The products that `saved` is of."""
    q, k, *_, a, b = inputs
    (_, T, H, HK, K, _), dplr, erase = plan.sizes, plan.rule.write == "dplr", plan.rule.write == "erase"
    delta = erase or plan.rule.write == "delta"
    reads, writes = (a, b) if dplr else (a if erase else k, k)
    wq, ww = plan.tokens(K), plan.tokens(K)
    wr, wv = plan.tokens(K) if dplr or delta else None, plan.tokens(K) if dplr else None
    launch(
        weigh_kernel, (plan.chunk_count, plan.rows), *filled(q, reads, writes, k, saved.running, wq, wr, ww, wv),
        plan.chunks.table, T, H=H, HK=HK, HR=H if dplr or erase else HK, HW=H if dplr else HK, K=K,
        BK=width(K), C=plan.chunk, DELTA=delta, DPLR=dplr,
        VARLEN=plan.packed, num_warps=8,
    )  # fmt: skip
    return ChunkProducts(wq, wr, ww, wv, saved)
