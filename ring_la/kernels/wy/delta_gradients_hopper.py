"""`delta_gradients` for Hopper, in Gluon, where copies and products are waited for by name.

The same sums, rounded in the same places; see there. A program is one chunk with all its channels, so that its pairs
are found once, both ways round; all it reads is on its way from its first instructions, and a product is awaited where
its result is used. Channels of keys go in halves of 64. The second halves of S and dS come where the first were: so two
programs of 128 channels fit a multiprocessor's shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ring_la.kernels.triton.gates import LEAST, LEAST_HALF
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
def along(x, tile):
    """Rows' products with what lies in `tile`."""
    return x * widened(tile.load(x.type.layout))


@gluon.jit
def read(a, S, like):
    """a S, started."""
    return warpgroup_mma(a, S, like, use_acc=False, is_async=True)


@gluon.jit
def with_pairs(
    dq, dread, dw, x, y, w, S, R, P, E, PT, ET, q, k, keep, reach, scale, passed, GATED: gl.constexpr
):  # fmt: skip
    """What the pairs add to half of the channels, started where what the states gave is there; `passed`: <k, w dS> by
    row. Names the tiles those products read, whose memory is given away after the last mention of their names."""
    dq = warpgroup_mma_wait(2, deps=[dq])
    dq *= (keep * scale)[:, None] if GATED else scale
    dq = warpgroup_mma(P, k, dq, is_async=True)
    dread = warpgroup_mma_wait(2, deps=[dread])
    if GATED:
        dread *= keep[:, None]
    dread = warpgroup_mma(E, k, dread, is_async=True)
    dw, _, _, _, _, _ = warpgroup_mma_wait(2, deps=[dw, x, y, w, S, R])
    if GATED:
        dw *= reach[:, None]
        passed += gl.sum(along(dw, k), 1)
    dw = warpgroup_mma(PT, q, dw, is_async=True)
    dw = warpgroup_mma(ET, k, dw, is_async=True)
    return dq, dread, dw, passed


@gluon.jit
def leave(dq, dread, dw, q, k, dq_, dk_, share, n, own, rows, zero, STRIDE: gl.constexpr, GATED: gl.constexpr):
    """dq and dk of half of the channels, stored; `own`: k·dread by row, β's share; `rows`: q·dq − k·dk as the decays
    see it. `zero` as for `ask_whole`."""
    dq = warpgroup_mma_wait(3, deps=[dq])
    if GATED:
        rows += gl.sum(along(dq, q), 1)
    dw, dread, q, k = warpgroup_mma_wait(0, deps=[dw, dread, q, k])
    keys = widened(k.load(dw.type.layout))
    own += gl.sum(dread * keys, 1)
    dread *= share[:, None]
    if GATED:
        rows -= gl.sum((dw + dread) * keys, 1)
    put(dq_, dq, n, 64, STRIDE, zero)
    put(dk_, dw - dread, n, 64, STRIDE, zero)
    return own, rows


@gluon.jit(do_not_specialize=SIZES)
def delta_gradient_hopper_kernel(
    q, k, v, F, do, u, dv, states, adjoints, dq_, dk_, dg_, dbeta_, table, T, NC, scale, H: gl.constexpr,
    HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One chunk of C = 64 tokens, K and V of 64 or 128, 4 warps; arguments as for `delta_gradient_kernel`, in bf16 or
    fp16."""
    s, h, b, start, n = chunk_here(table, T, H, C, VARLEN)
    if n <= 0:
        return
    HALF: gl.constexpr = 64
    TWO: gl.constexpr = K == 2 * HALF
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kind: gl.constexpr = v.dtype.element_ty
    x = gl.allocate_shared_memory(kind, [C, V], SHARED)
    y = gl.allocate_shared_memory(kind, [C, V], SHARED)
    w = gl.allocate_shared_memory(kind, [C, V], SHARED)
    S = gl.allocate_shared_memory(kind, [V, HALF], SHARED)
    R = gl.allocate_shared_memory(kind, [V, HALF], SHARED)
    qs = gl.allocate_shared_memory(kind, [C, HALF], SHARED)
    ks = gl.allocate_shared_memory(kind, [C, HALF], SHARED)

    chunk = (b.to(gl.int64) * NC + s) * H + h
    token = b.to(gl.int64) * T + start
    q += (token * HK + h // (H // HK)) * K
    k += (token * HK + h // (H // HK)) * K
    value = (token * H + h) * V
    states += chunk * (K * V)
    adjoints += chunk * (K * V)
    dq_ += (token * H + h) * K
    dk_ += (token * H + h) * K
    ask(x, do + value, n, V, H * V)
    ask(w, u + value, n, V, H * V)
    ask(y, dv + value, n, V, H * V)
    async_copy.commit_group()
    ask_whole(S, states, HALF, K)
    ask_whole(R, adjoints, HALF, K)
    async_copy.commit_group()
    ask(ks, k, n, HALF, HK * K)
    ask(qs, q, n, HALF, HK * K)
    if TWO:
        q_later = gl.allocate_shared_memory(kind, [C, HALF], SHARED)
        k_later = gl.allocate_shared_memory(kind, [C, HALF], SHARED)
        ask(k_later, k + HALF, n, HALF, HK * K)
        ask(q_later, q + HALF, n, HALF, HK * K)
    async_copy.commit_group()

    f = F + chunk * (4 * C)
    row = gl.arange(0, C, ROWS)
    column = gl.arange(0, C, COLUMNS)
    # A thread's columns are two by two, eight apart: so each is compared with a constant, and none is held.
    lag = row[:, None] - (column & 6)[None, :]
    step = (column & 57)[None, :]
    be = gl.load(f + 3 * C + row)
    least: gl.constexpr = LEAST_HALF if kind == gl.float16 else LEAST
    divisor = gl.where(gl.abs(be) < least, least, be)
    share = be / divisor if kind == gl.float16 else gl.full([C], 1.0, gl.float32, ROWS)
    share_column = gl.convert_layout(share, COLUMNS)
    zero = gl.zeros([C, HALF], gl.float32, PAIRS)
    passed = gl.zeros([C], gl.float32, ROWS)
    rows = gl.zeros([C], gl.float32, ROWS)
    own = gl.zeros([C], gl.float32, ROWS)
    keep = rows
    reach = rows
    if GATED:
        g_row = gl.load(f + row)
        g_column = gl.load(f + column)
        keep = gl.load(f + C + row)
        reach = gl.load(f + 2 * C + row)
        gc = gl.load(f + C - 1)
    others = gl.where(lag == step, 0.0, 1.0)

    arrived(2)
    P = product(x, w, zero)  # [i, j]
    E = product(y, w, zero)
    if GATED:
        down = weights(lag >= step, g_row[:, None] - g_column[None, :])
    else:
        down = gl.where(lag >= step, 1.0, 0.0)
    P = warpgroup_mma_wait(1, deps=[P])
    P = gl.convert_layout((P * down * scale).to(kind), LEFT)
    PT = product(w, x, zero)  # [j, i]
    E = warpgroup_mma_wait(1, deps=[E])
    E = gl.convert_layout((E * (down * others)).to(kind), LEFT)
    ET = product(w, y, zero)
    arrived(1)
    if GATED:
        through = passing(S, R, STATE)
        g_row = gl.load(f + row)  # again, rather than hold them
        g_column = gl.load(f + column)
        down = weights(lag <= step, g_column[None, :] - g_row[:, None])
    else:
        down = gl.where(lag <= step, 1.0, 0.0)
    PT = warpgroup_mma_wait(1, deps=[PT])
    PT = gl.convert_layout((PT * down * scale).to(kind), LEFT)
    dq = read(x, S, zero)
    ET = warpgroup_mma_wait(1, deps=[ET])
    ET = gl.convert_layout((ET * (down * others * -share_column[None, :])).to(kind), LEFT)
    dread = read(y, S, zero)
    dw = read(w, R, zero)
    arrived(0)
    dq, dread, dw, passed = with_pairs(
        dq, dread, dw, x, y, w, S, R, P, E, PT, ET, qs, ks, keep, reach, scale, passed, GATED
    )
    if TWO:
        gl.thread_barrier()
        ask_whole(S, states + HALF, HALF, K, n >> 7)
        ask_whole(R, adjoints + HALF, HALF, K, n >> 7)
        async_copy.commit_group()
    own, rows = leave(dq, dread, dw, qs, ks, dq_, dk_, share, n, own, rows, 0, H * K, GATED)
    r = gl.arange(0, C, gl.SliceLayout(1, VALUES)) + (n >> 7)
    c = gl.arange(0, V, gl.SliceLayout(0, VALUES))
    v += value
    values = gl.load(v + r[:, None] * (H * V) + c[None, :], mask=(r < n)[:, None], other=0.0)
    dbe = gl.sum(widened(y.load(VALUES)) * widened(values), 1)
    if TWO:
        arrived(0)
        dq = read(x, S, zero)
        dread = read(y, S, zero)
        dw = read(w, R, zero)
        if GATED:
            through += passing(S, R, STATE)
        dq, dread, dw, passed = with_pairs(
            dq, dread, dw, x, y, w, S, R, P, E, PT, ET, q_later, k_later, keep, reach, scale, passed, GATED
        )
        own, rows = leave(
            dq, dread, dw, q_later, k_later, dq_ + HALF, dk_ + HALF, share, n, own, rows, n >> 7, H * K, GATED
        )

    t = gl.arange(0, C, FLAT)
    at = (token + t) * H + h
    dbe = gl.convert_layout(dbe, FLAT) - gl.convert_layout(own, FLAT)
    gl.store(dbeta_ + at, dbe / gl.convert_layout(divisor, FLAT), mask=t < n)
    if GATED:
        dg = gl.associative_scan(gl.convert_layout(rows, FLAT), 0, plus, reverse=True)
        dg += gl.sum(through, 0) * gl.exp2(gc) + gl.sum(passed, 0)
        gl.store(dg_ + at, dg, mask=t < n)
