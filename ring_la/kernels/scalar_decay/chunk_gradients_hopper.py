"""`chunk_gradients` for Hopper, in Gluon, where copies and products are waited for by name.

The same sums, rounded in the same places; see there. A program is one chunk again, but all it reads is on its way from
its first instructions, products run while the factors of others are made, and results are stored while the next
products run. Channels of q and k go in halves of 64. The second half of S comes where the first was: so two programs of
128 channels fit a multiprocessor's shared memory, to the byte.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ring_la.kernels.triton.gluon_tiles import (
    arrived,
    ask,
    ask_whole,
    chunk_here,
    passing,
    plus,
    product,
    put,
    weights,
    widened,
)
from ring_la.kernels.triton.tiles import SIZES


@gluon.jit
def weighed(x, factors, other, sums):
    """x, its rows times `factors`, and `sums` with the rows' products with what lies in `other`."""
    x = x * factors[:, None]
    return x, sums + gl.sum(x * widened(other.load(x.type.layout)), 1)


@gluon.jit(do_not_specialize=SIZES)
def additive_gradient_hopper_kernel(
    q, k, v, do, F, states, adjoints, dq_, dk_, dv_, dg_, table, T, NC, scale, H: gl.constexpr, HK: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One chunk of C = 64 tokens, K and V of 64 or 128, 4 warps; arguments as for `additive_gradient_kernel`, with a
    decay by token."""
    s, h, b, start, n = chunk_here(table, T, H, C, VARLEN)
    if n <= 0:
        return
    HALF: gl.constexpr = 64
    TWO: gl.constexpr = K == 2 * HALF
    LATER: gl.constexpr = 1 if TWO else 0
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kind: gl.constexpr = v.dtype.element_ty
    z = gl.allocate_shared_memory(kind, [C, V], SHARED)
    w = gl.allocate_shared_memory(kind, [C, V], SHARED)
    x = gl.allocate_shared_memory(kind, [K // HALF, C, HALF], SHARED)
    y = gl.allocate_shared_memory(kind, [K // HALF, C, HALF], SHARED)
    R = gl.allocate_shared_memory(kind, [K // HALF, HALF, V], SHARED)
    S = gl.allocate_shared_memory(kind, [HALF, V], SHARED)

    chunk = (b.to(gl.int64) * NC + s) * H + h
    token = b.to(gl.int64) * T + start
    q += (token * HK + h // (H // HK)) * K
    k += (token * HK + h // (H // HK)) * K
    v += (token * H + h) * V
    do += (token * H + h) * V
    states += chunk * (K * V)
    adjoints += chunk * (K * V)
    ask(z, v, n, V, H * V)
    ask(w, do, n, V, H * V)
    async_copy.commit_group()
    for m in gl.static_range(K // HALF):
        ask(x.index(m), q + m * HALF, n, HALF, HK * K)
        ask(y.index(m), k + m * HALF, n, HALF, HK * K)
    async_copy.commit_group()
    ask_whole(S, states, V, V)
    for m in gl.static_range(K // HALF):
        ask_whole(R.index(m), adjoints + m * HALF * V, V, V)
    async_copy.commit_group()

    f = F + chunk * (4 * C)
    row = gl.arange(0, C, gl.SliceLayout(1, NARROW))
    column = gl.arange(0, C, gl.SliceLayout(0, NARROW))
    g_row = gl.load(f + row)
    g_column = gl.load(f + column)
    keep = gl.load(f + C + row)
    reach = gl.load(f + 2 * C + row)
    reach_wide = gl.load(f + 2 * C + gl.arange(0, C, gl.SliceLayout(1, WIDE)))
    gc = gl.load(f + C - 1)
    narrow = gl.zeros([C, HALF], gl.float32, NARROW)
    wide = gl.zeros([C, V], gl.float32, WIDE)

    arrived(2)
    A = product(w, z, narrow)  # [i, j]
    B = product(z, w, narrow)  # [j, i]
    decay = weights(row[:, None] >= column[None, :], g_row[:, None] - g_column[None, :]) * scale
    A = warpgroup_mma_wait(1, deps=[A])
    A = gl.convert_layout((A * decay).to(kind), gl.DotOperandLayout(0, NARROW, 2))
    arrived(1)
    P = product(y.index(0), x.index(0), narrow)  # k·q, [j, i]
    if TWO:
        P = warpgroup_mma(y.index(1), x.index(1).permute((1, 0)), P, is_async=True)
    decay = weights(row[:, None] <= column[None, :], g_column[None, :] - g_row[:, None]) * scale
    P, B = warpgroup_mma_wait(0, deps=[P, B])
    P = P * decay
    pairs = gl.where(row[:, None] < column[None, :], P * B, 0.0)
    reads = gl.convert_layout(gl.sum(pairs, 0), gl.SliceLayout(1, NARROW)) - gl.sum(pairs, 1)
    writes = gl.zeros([C], gl.float32, gl.SliceLayout(1, NARROW))
    B = gl.convert_layout((B * decay).to(kind), gl.DotOperandLayout(0, NARROW, 2))
    P = gl.convert_layout(P.to(kind), gl.DotOperandLayout(0, WIDE, 2))

    arrived(0)
    dq = product(w, S, narrow)
    dk = product(z, R.index(0), narrow)
    if TWO:
        dk_later = product(z, R.index(1), narrow)
    through = passing(S, R.index(0), STATE)
    dq, second = warpgroup_mma_wait(1 + LATER, deps=[dq, S])
    if TWO:
        gl.thread_barrier()
        ask_whole(second, states + HALF * V, V, V)
        async_copy.commit_group()
    dq, reads = weighed(dq, keep, x.index(0), reads)
    dq = warpgroup_mma(A, y.index(0), dq, is_async=True)
    dk = warpgroup_mma_wait(1 + LATER, deps=[dk])
    dk, writes = weighed(dk, reach, y.index(0), writes)
    dk = warpgroup_mma(B, x.index(0), dk, is_async=True)
    if TWO:
        dk_later = warpgroup_mma_wait(2, deps=[dk_later])
        dk_later, writes = weighed(dk_later, reach, y.index(1), writes)
        dk_later = warpgroup_mma(B, x.index(1), dk_later, is_async=True)
        dk_later = warpgroup_mma_wait(0, deps=[dk_later])
    # A tile's memory is given away after the last mention of its own name, so what a product reads is mentioned where
    # it is awaited, or later. By a name that comes back addresses are made anew; held, they would spill others.
    dq, dk, _, _, keys = warpgroup_mma_wait(0, deps=[dq, dk, z, x, y])
    dq_ += (token * H + h) * K
    dk_ += (token * H + h) * K
    put(dq_, dq, n, HALF, H * K)
    put(dk_, dk, n, HALF, H * K)
    if TWO:
        put(dk_ + HALF, dk_later, n, HALF, H * K)
        arrived(0)
        dq = product(w, second, narrow)
    dv = warpgroup_mma(keys.index(0), R.index(0), wide, use_acc=False, is_async=True)
    if TWO:
        dv = warpgroup_mma(keys.index(1), R.index(1), dv, is_async=True)
        through += passing(second, R.index(1), STATE)
        dq = warpgroup_mma_wait(2, deps=[dq])
        dq, reads = weighed(dq, keep, x.index(1), reads)
        dq = warpgroup_mma(A, keys.index(1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
    dv, _, _, _ = warpgroup_mma_wait(0, deps=[dv, y, R, S])
    gl.thread_barrier()
    dv = warpgroup_mma(P, w, dv * reach_wide[:, None], is_async=True)
    if TWO:
        put(dq_ + HALF, dq, n, HALF, H * K)
    dv, _ = warpgroup_mma_wait(0, deps=[dv, w])
    put(dv_ + (token * H + h) * V, dv, n, V, H * V)

    reads = gl.convert_layout(reads, FLAT)
    writes = gl.convert_layout(writes, FLAT)
    dg = gl.associative_scan(reads, 0, plus, reverse=True) + gl.associative_scan(writes, 0, plus) - writes
    dg += gl.sum(through, 0) * gl.exp2(gc)
    t = gl.arange(0, C, FLAT)
    gl.store(dg_ + (token + t) * H + h, dg, mask=t < n)
