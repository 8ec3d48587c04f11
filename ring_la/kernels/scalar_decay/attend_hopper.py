"""o's pass of `attend` for Hopper, in Gluon, where heads of 128 key channels have 64 value channels and decay by token.

The same sums; but v comes times e^{G_C−G} for the state, where `attend_kernel` weighs k, which is twice as wide. What a
chunk waits for decides the time here as there: so the next chunk is on its way while this one is multiplied (a pass of
`attend_kernel` that leaves two programs room asks for it when this one is done), and a chunk's four products are asked
for as soon as their operands are there. The state before a chunk is rounded into shared memory once, as an operand and
to be stored. Two programs fit a multiprocessor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.scalar_decay.operands import Gates
from ring_la.kernels.spans.plan import SpanPlan
from ring_la.kernels.triton.gluon_tiles import arrived, ask, product, put_by, span_here, weights, widened
from ring_la.kernels.triton.tiles import SIZES


@gluon.jit
def ask_chunk(x, x2, y, y2, z, slot, q, k, v, n, H: gl.constexpr, HK: gl.constexpr):
    """Start to copy n tokens at q, k and v to where `slot`, 0 or 1, says."""
    D: gl.constexpr = z.shape[2]
    ask(x.index(slot), q, n, D, HK * 2 * D)
    ask(y.index(slot), k, n, D, HK * 2 * D)
    ask(x2.index(slot), q + D, n, D, HK * 2 * D)
    ask(y2.index(slot), k + D, n, D, HK * 2 * D)
    ask(z.index(slot), v, n, D, H * D)
    async_copy.commit_group()


@gluon.jit
def ask_factors(factors, slot, f):
    """Start to copy a chunk's four rows of factors."""
    LINE: gl.constexpr = gl.BlockedLayout([factors.shape[1] // 128], [32], [4], [0])
    async_copy.async_copy_global_to_shared(factors.index(slot), f + gl.arange(0, factors.shape[1], LINE))


@gluon.jit
def put_state(held, p, D: gl.constexpr, ROWS: gl.constexpr):
    """Store half a state from shared memory."""
    r = gl.arange(0, D, gl.SliceLayout(1, ROWS))
    e = gl.arange(0, D, gl.SliceLayout(0, ROWS))
    gl.store(p + r[:, None] * D + e[None, :], held.load(ROWS))


@gluon.jit(do_not_specialize=SIZES)
def attend_hopper_kernel(
    q, k, v, F, SKIPPED, entering, o_, leaving, states, table, T, NS, NC, N, LENGTH, scale, H: gl.constexpr,
    HK: gl.constexpr, C: gl.constexpr, STRONG: gl.constexpr, SKIP: gl.constexpr, HAS_STATE: gl.constexpr,
    LEAVE: gl.constexpr, KEEP: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """One span in chunks of C = 64 tokens, K 128 and V 64, 4 warps; arguments as for `attend_kernel`."""
    s = gl.program_id(0)
    b = gl.program_id(1) // H
    h = gl.program_id(1) % H
    start, end, piece, first_chunk, last = span_here(table, s, T, LENGTH, C, VARLEN)
    left = end - start
    if left <= 0:
        return
    D: gl.constexpr = 64
    K: gl.constexpr = 2 * D
    STEP: gl.constexpr = H * 4 * C
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kind: gl.constexpr = v.dtype.element_ty
    x = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    x2 = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    y = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    y2 = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    z = gl.allocate_shared_memory(kind, [2, C, D], SHARED)
    held = gl.allocate_shared_memory(kind, [D, D], SHARED)
    held2 = gl.allocate_shared_memory(kind, [D, D], SHARED)
    w = gl.allocate_shared_memory(kind, [C, D], SHARED)
    factors = gl.allocate_shared_memory(gl.float32, [2, 4 * C], PLAIN)

    token = b.to(gl.int64) * T + start
    chunk = (b.to(gl.int64) * NC + first_chunk) * H + h
    q += (token * HK + h // (H // HK)) * K
    k += (token * HK + h // (H // HK)) * K
    v += (token * H + h) * D
    o_ += (token * H + h) * D
    f = F + chunk * (4 * C)
    n = (left + C - 1) // C
    ask_factors(factors, 0, f)
    ask_chunk(x, x2, y, y2, z, 0, q, k, v, left, H, HK)

    row = gl.arange(0, C, gl.SliceLayout(1, TILE))
    column = gl.arange(0, C, gl.SliceLayout(0, TILE))
    zeros = gl.zeros([C, D], gl.float32, TILE)
    at = row[:, None] * D + column[None, :]
    S = zeros
    S2 = zeros
    if HAS_STATE:
        entering += ((b.to(gl.int64) * NS + s) * H + h) * (K * D)
        S = gl.load(entering + at)
        S2 = gl.load(entering + D * D + at)
    if SKIP:
        skip = gl.load(SKIPPED + h).to(gl.float32)
    held.store(S.to(kind))
    held2.store(S2.to(kind))
    through = gl.exp2(gl.load(f + C - 1))
    S = S * through
    S2 = S2 * through
    t = gl.arange(0, C, gl.SliceLayout(1, ROWS))
    keep = gl.load(f + 2 * C + t)
    for i in range(n):
        slot = i % 2
        c = i * C
        arrived(0)
        A = product(x.index(slot), y.index(slot), zeros)
        A = warpgroup_mma(x2.index(slot), y2.index(slot).permute((1, 0)), A, is_async=True)
        o = warpgroup_mma(x.index(slot), held, zeros, use_acc=False, is_async=True)
        o = warpgroup_mma(x2.index(slot), held2, o, is_async=True)
        following = f + gl.minimum(i + 1, n - 1) * STEP
        ask_factors(factors, 1 - slot, following)
        w.store((widened(z.index(slot).load(ROWS)) * keep[:, None]).to(kind))
        gc = gl.load(following + C - 1)
        keep = gl.load(following + 2 * C + t)
        fence_async_shared()
        gl.thread_barrier()
        S = warpgroup_mma(y.index(slot).permute((1, 0)), w, S, is_async=True)
        S2 = warpgroup_mma(y2.index(slot).permute((1, 0)), w, S2, is_async=True)
        first = c + C
        ask_chunk(
            x, x2, y, y2, z, 1 - slot, q + first * (HK * K), k + first * (HK * K), v + first * (H * D), left - first,
            H, HK,
        )  # fmt: skip
        if KEEP:
            place = states + (chunk + i * H) * (K * D)
            put_state(held, place, D, ROWS)
            put_state(held2, place + D * D, D, ROWS)
        own = factors.index(slot)
        g_row = own.slice(0, C).load(gl.SliceLayout(1, TILE))
        g_column = own.slice(0, C).load(gl.SliceLayout(0, TILE))
        reach = own.slice(C, C).load(gl.SliceLayout(1, TILE))
        decay = weights(row[:, None] >= column[None, :], g_row[:, None] - g_column[None, :])
        if STRONG:
            decay = decay * (own.slice(3 * C, C).load(gl.SliceLayout(0, TILE)) * scale)[None, :]
        else:
            decay = decay * scale
        A = warpgroup_mma_wait(4, deps=[A])
        A = A * decay
        if SKIP:
            A += gl.where(row[:, None] == column[None, :], skip, 0.0)
        A = gl.convert_layout(A.to(kind), LEFT)
        o = warpgroup_mma_wait(2, deps=[o])
        o = warpgroup_mma(A, z.index(slot), o * reach[:, None], is_async=True)
        o, S, S2 = warpgroup_mma_wait(0, deps=[o, S, S2])
        gl.thread_barrier()
        put_by(w, o_ + c * (H * D), o, left - c, H * D)
        held.store(S.to(kind))
        held2.store(S2.to(kind))
        through = gl.exp2(gl.where(i + 1 < n, gc, 0.0))
        S = S * through
        S2 = S2 * through
    if LEAVE:
        if last:
            leaving += ((b.to(gl.int64) * N + piece) * H + h) * (K * D)
            gl.store(leaving + at, S)
            gl.store(leaving + D * D + at, S2)


def outputs(
    plan: SpanPlan, gates: Gates, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, entering: Tensor | None,
    leaving: Tensor | None, states: Tensor | None,
) -> None:  # fmt: skip
    """o of all spans, given the states that enter them (None: zero), and where states go (see `attend.Left`)."""
    spans, T = plan.spans, plan.sizes.T
    constants: dict[str, Any] = dict(H=plan.sizes.H, HK=plan.sizes.HK, C=plan.chunk, VARLEN=plan.packed)
    launch(
        attend_hopper_kernel, (spans.count, plan.rows),
        *filled(*qkv, gates.read, gates.skip, entering, out, leaving, states), spans.table, T, spans.count,
        plan.chunk_count, spans.pieces, spans.length, plan.scale, **constants, STRONG=gates.strong,
        SKIP=gates.skip is not None, HAS_STATE=entering is not None, LEAVE=leaving is not None,
        KEEP=states is not None, num_warps=4,
    )  # fmt: skip
