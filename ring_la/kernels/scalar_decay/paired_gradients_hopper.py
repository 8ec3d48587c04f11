"""`chunk_gradients` for Hopper, in Gluon, where two heads of 64 value channels share keys of 128: a chunk of both a
program.

A program reads q and k once for both, and leaves the sums of both heads' dq and dk; of several pairs that share q and
k, the last program of a chunk that ends adds them up, which the L2 cache still holds. What is inside a chunk is summed
before it is multiplied, (B_1 + B_2) q for B_1 q + B_2 q; what comes in with the state is read apart, since the decays'
gradients want it by head. With β (`kernels.strength`), x for v and u the sums below,

    dx_j = β_j dv_j            dβ_j = e^{G_C−G_j} u_j + Σ_{i≥j} P_ji (x_j·do_i)            u_j = k_j · R x_j

How many instructions a program has decides its time: four warps, two programs a multiprocessor, hide little. So the
pairs' factors are made once, for dk, and dq reads them from shared memory, transposed. dk's halves come first: with
them x is done with, and its memory serves those factors and what is stored. The second half of S comes where the first
was, while dv is made.
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
    product,
    put_by,
    weights,
    widened,
)
from ring_la.kernels.triton.tiles import SIZES


@gluon.jit
def by_token(x, FLAT: gl.constexpr):
    """Sums of rows, found by here: the compiler puts off what is used late, and keeps all its terms, unless it goes
    through shared memory."""
    return gl.convert_layout(gl.sum(x, 1), FLAT)


@gluon.jit
def from_states(rows, rows2, first, second, dotted, inside, pairs, factor, factor2, u, u2, zeros, FLAT: gl.constexpr):
    """64 channels of dq or dk: of each head its rows times its state, by a factor a token, and once `pairs` times
    `inside`; and u, u2, to which the heads' products with `dotted` are added before they are multiplied."""
    x = product(rows, first, zeros)
    y = product(rows2, second, zeros)
    z = widened(dotted.load(zeros.type.layout))
    x = warpgroup_mma_wait(1, deps=[x])
    u += by_token(x * z, FLAT)
    x = x * factor[:, None]
    y, _, _ = warpgroup_mma_wait(0, deps=[y, rows, rows2])
    u2 += by_token(y * z, FLAT)
    x = warpgroup_mma(pairs, inside, x + y * factor2[:, None], is_async=True)
    return warpgroup_mma_wait(0, deps=[x]), u, u2


@gluon.jit
def pairs_of(P, B, g_row, g_column, seen, step, scale, STRONG: gl.constexpr, FLAT: gl.constexpr):
    """Of a head, [j, i]: the factors of do in dv and of q in dk, and sums of the pairs by column, with β, and by row,
    without. A token's pair with itself is in both, and cancels. B: x·do; P: k·q times `scale`."""
    decay = weights(seen, g_column[None, :] - g_row[:, None])
    P = P * decay
    pairs = P * B
    of_rows = by_token(pairs, FLAT)
    if STRONG:
        pairs = pairs * step[:, None]
        P = P * step[:, None]
        B = B * decay * (step * scale)[:, None]
    else:
        B = B * decay * scale
    return P, B, gl.convert_layout(gl.sum(pairs, 0), FLAT), of_rows


@gluon.jit
def both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def add_up(x, out, n, PAIRS: gl.constexpr, HK: gl.constexpr, C: gl.constexpr, K: gl.constexpr):
    """Sums in fp32, to n rows of `out`, of as many of `x`, which other programs have left."""
    ROWS: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    c = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    for first in gl.static_range(0, C, ROWS):
        r = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        total = gl.zeros([ROWS, K], gl.float32, layout)
        for i in gl.static_range(PAIRS):
            at = x + r * (HK * PAIRS * K) + i * K + c
            total += gl.load(at, mask=r < n, other=0.0, cache_modifier=".cg").to(gl.float32)
        gl.store(out + r * (HK * K) + c, total.to(out.dtype.element_ty), mask=r < n)


@gluon.jit(do_not_specialize=SIZES)
def paired_gradient_kernel(
    q, k, v, do, F, SKIPPED, states, adjoints, dq_, dk_, dv_, dg_, db_, da_, q_sum, k_sum, ended, table, T, NC, scale,
    H: gl.constexpr, HK: gl.constexpr, C: gl.constexpr, VARLEN: gl.constexpr, STRONG: gl.constexpr, SKIP: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """One chunk of C = 64 tokens of two heads, K 128 and V 64, 4 warps; arguments as for `additive_gradient_kernel`,
    dq and dk [B, T, H / 2, K]. PAIRS of heads share q and k; if several, their sums go to q_sum and k_sum
    [B, T, HK, K], and `ended` [B, NC, HK] counts programs from zero."""
    s, pair, b, start, n = chunk_here(table, T, H // 2, C, VARLEN)
    if n <= 0:
        return
    D: gl.constexpr = 64
    K: gl.constexpr = 2 * D
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    STATE: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kind: gl.constexpr = v.dtype.element_ty
    z = gl.allocate_shared_memory(kind, [C, D], SHARED)
    z2 = gl.allocate_shared_memory(kind, [C, D], SHARED)
    w = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    x = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    y = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    R = gl.allocate_shared_memory(kind, [4, D, D], SHARED)
    S = gl.allocate_shared_memory(kind, [2, D, D], SHARED)

    h = 2 * pair
    chunk = (b.to(gl.int64) * NC + s) * H + h
    token = b.to(gl.int64) * T + start
    shared = pair // PAIRS
    q += (token * HK + shared) * K
    k += (token * HK + shared) * K
    v += (token * H + h) * D
    do += (token * H + h) * D
    states += chunk * (K * D)
    adjoints += chunk * (K * D)
    ask(z, v, n, D, H * D)
    ask(z2, v + D, n, D, H * D)
    for a in gl.static_range(2):
        ask(w.index(a), do + a * D, n, D, H * D)
    async_copy.commit_group()
    for m in gl.static_range(2):
        ask(x.index(m), q + m * D, n, D, HK * K)
        ask(y.index(m), k + m * D, n, D, HK * K)
    async_copy.commit_group()
    for m in gl.static_range(4):  # halves of the first head's, then of the second's
        ask_whole(R.index(m), adjoints + m * D * D, D, D)
    async_copy.commit_group()
    for a in gl.static_range(2):
        ask_whole(S.index(a), states + a * K * D, D, D)
    async_copy.commit_group()

    f = F + chunk * (4 * C)
    row = gl.arange(0, C, gl.SliceLayout(1, TILE))
    column = gl.arange(0, C, gl.SliceLayout(0, TILE))
    zeros = gl.zeros([C, D], gl.float32, TILE)
    none = gl.zeros([C], gl.float32, FLAT)
    g_row = gl.load(f + row)
    g_row2 = gl.load(f + 4 * C + row)
    g_column = gl.load(f + column)
    g_column2 = gl.load(f + 4 * C + column)
    step = g_row
    step2 = g_row2

    t = gl.arange(0, C, FLAT)
    if STRONG:
        step = gl.load(f + 3 * C + row)
        step2 = gl.load(f + 7 * C + row)

    arrived(2)
    P = product(y.index(0), x.index(0), zeros)  # k·q, [j, i]
    P = warpgroup_mma(y.index(1), x.index(1).permute((1, 0)), P, is_async=True)
    B = product(z, w.index(0), zeros)
    B2 = product(z2, w.index(1), zeros)
    P, B, B2 = warpgroup_mma_wait(0, deps=[P, B, B2])
    if SKIP:
        same = row[:, None] == column[None, :]
        da_ += token * H + h
        gl.store(da_ + t * H, by_token(gl.where(same, B, 0.0), FLAT), mask=t < n)
        gl.store(da_ + t * H + 1, by_token(gl.where(same, B2, 0.0), FLAT), mask=t < n)
    seen = row[:, None] <= column[None, :]
    P = P * scale
    P1, B, reads, inside = pairs_of(P, B, g_row, g_column, seen, step, scale, STRONG, FLAT)
    P1 = gl.convert_layout(P1.to(kind), LEFT)
    P2, B2, reads2, inside2 = pairs_of(P, B2, g_row2, g_column2, seen, step2, scale, STRONG, FLAT)
    P2 = gl.convert_layout(P2.to(kind), LEFT)
    pairs = (B + B2).to(kind)
    B = gl.convert_layout(pairs, LEFT)

    arrived(1)
    reach = gl.load(f + 2 * C + row)
    reach2 = gl.load(f + 6 * C + row)
    dk, u, u2 = from_states(
        z, z2, R.index(0), R.index(2), y.index(0), x.index(0), B, reach, reach2, none, none, zeros, FLAT
    )  # fmt: skip
    dk_later, u, u2 = from_states(
        z, z2, R.index(1), R.index(3), y.index(1), x.index(1), B, reach, reach2, u, u2, zeros, FLAT
    )  # fmt: skip
    dq_ += (token * (H // 2) + pair) * K
    dk_ += (token * (H // 2) + pair) * K
    gl.thread_barrier()
    z.store(pairs)
    put_by(z2, dk_, dk, n, H // 2 * K)
    put_by(z2, dk_ + D, dk_later, n, H // 2 * K)
    A = z.permute((1, 0))  # [i, j]

    arrived(0)
    keep = gl.load(f + C + row)
    keep2 = gl.load(f + 5 * C + row)
    dq, r, r2 = from_states(
        w.index(0), w.index(1), S.index(0), S.index(1), x.index(0), y.index(0), A, keep, keep2, none, none, zeros, FLAT
    )  # fmt: skip
    through = passing(S.index(0), R.index(0), STATE)
    through2 = passing(S.index(1), R.index(2), STATE)
    gl.thread_barrier()
    for a in gl.static_range(2):
        ask_whole(S.index(a), states + a * K * D + D * D, D, D)
    async_copy.commit_group()
    put_by(z2, dq_, dq, n, H // 2 * K)
    dv = warpgroup_mma(y.index(0), R.index(0), zeros, use_acc=False, is_async=True)
    dv = warpgroup_mma(y.index(1), R.index(1), dv, is_async=True)
    dv2 = warpgroup_mma(y.index(0), R.index(2), zeros, use_acc=False, is_async=True)
    dv2 = warpgroup_mma(y.index(1), R.index(3), dv2, is_async=True)
    dv = warpgroup_mma_wait(2, deps=[dv])
    dv = warpgroup_mma(P1, w.index(0), dv * reach[:, None], is_async=True)
    dv2 = warpgroup_mma_wait(1, deps=[dv2])
    dv2 = warpgroup_mma(P2, w.index(1), dv2 * reach2[:, None], is_async=True)
    dv, dv2 = warpgroup_mma_wait(0, deps=[dv, dv2])
    if SKIP:
        dv += widened(w.index(0).load(TILE)) * gl.load(SKIPPED + h).to(gl.float32)
        dv2 += widened(w.index(1).load(TILE)) * gl.load(SKIPPED + h + 1).to(gl.float32)
    dv_ += (token * H + h) * D
    put_by(z2, dv_, dv, n, H * D)
    put_by(z2, dv_ + D, dv2, n, H * D)

    arrived(0)
    dq, r, r2 = from_states(
        w.index(0), w.index(1), S.index(0), S.index(1), x.index(1), y.index(1), A, keep, keep2, r, r2, zeros, FLAT
    )  # fmt: skip
    through += passing(S.index(0), R.index(1), STATE)
    through2 += passing(S.index(1), R.index(3), STATE)
    put_by(z2, dq_ + D, dq, n, H // 2 * K)

    gc = gl.load(f + C - 1)
    gc2 = gl.load(f + 5 * C - 1)
    if STRONG:
        db_ += token * H + h
        gl.store(db_ + t * H, inside + u * gl.exp2(gc - gl.load(f + t)), mask=t < n)
        gl.store(db_ + t * H + 1, inside2 + u2 * gl.exp2(gc2 - gl.load(f + 4 * C + t)), mask=t < n)
        inside *= gl.load(f + 3 * C + t)
        inside2 *= gl.load(f + 7 * C + t)
    reads += r * gl.load(f + C + t) - inside
    reads2 += r2 * gl.load(f + 5 * C + t) - inside2
    writes = u * gl.load(f + 2 * C + t)
    writes2 = u2 * gl.load(f + 6 * C + t)
    later, later2 = gl.associative_scan((reads, reads2), 0, both, reverse=True)
    earlier, earlier2 = gl.associative_scan((writes, writes2), 0, both)
    dg_ += token * H + h
    gl.store(dg_ + t * H, later + earlier - writes + gl.sum(through, 0) * gl.exp2(gc), mask=t < n)
    gl.store(dg_ + t * H + 1, later2 + earlier2 - writes2 + gl.sum(through2, 0) * gl.exp2(gc2), mask=t < n)
    if PAIRS > 1:
        gl.thread_barrier()  # all of the program's dq and dk are on their way, which the count lets be seen
        before = gl.atomic_add(ended + (b.to(gl.int64) * NC + s) * HK + shared, 1, sem="acq_rel", scope="gpu")
        if before == PAIRS - 1:
            others = (pair - shared * PAIRS) * K
            add_up(dq_ - others, q_sum + (token * HK + shared) * K, n, PAIRS, HK, C, K)
            add_up(dk_ - others, k_sum + (token * HK + shared) * K, n, PAIRS, HK, C, K)
