"""The walks over chunks, some columns of a head's states a program: all that has to wait for the chunk before."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fenwick.device import put, state_at, tile
from ring_la.kernels.momentum.device import SIZES, rates_at
from ring_la.kernels.momentum.launches import ChunksCall, Given
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.triton.tiles import head


@triton.jit
def place(documents, N, H: tl.constexpr, ROWED: tl.constexpr):
    """(batch row, head, row of the states, first chunk, chunks, first token and end) of a program's document."""
    n = tl.program_id(1) % N
    h = tl.program_id(1) // N % H
    b = tl.program_id(1) // (N * H)
    at = documents + n * 4
    return b, h, b if ROWED else n, tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def columns(n, h, e, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    """(where columns e of a document's state are, which are there)."""
    d = tl.arange(0, BK)
    at = (n.to(tl.int64) * H + h) * K * V + d[:, None] * V + e[None, :]
    return at, (d < K)[:, None] & (e < V)[None, :]


@triton.jit(do_not_specialize=SIZES)
def forwards_kernel(
    k, P1, P2, U, rates, S0, M0, documents, W, Ss, Ms, S_end, M_end, T, R, N, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, HAS_STATE: tl.constexpr,
    ROWED: tl.constexpr,
):  # fmt: skip
    """w of all tokens, S and M before each chunk, and the last ones."""
    b, h, n, row, count, start, end = place(documents, N, H, ROWED)
    d = tl.arange(0, BK)
    t = tl.arange(0, C)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    at, whole = columns(n, h, e, H, K, V, BK)
    S = tl.zeros([BK, BV], tl.float32)
    M = tl.zeros([BK, BV], tl.float32)
    if HAS_STATE:
        S += tl.load(S0 + at, whole, other=0.0)
        M += tl.load(M0 + at, whole, other=0.0)
    inside = d[:, None] * V + e[None, :]
    for i in range(count):
        token = start + i * C + t
        live = token < end
        said = rates_at(rates, b, row + i, h, R, H, C)
        kept = tl.load(said + 6 * C)
        mixed = tl.load(said + 6 * C + 1)
        held = tl.load(said + 6 * C + 2)
        S_now = S.to(Ss.dtype.element_ty)
        M_now = M.to(Ms.dtype.element_ty)
        tl.store(state_at(Ss, b, row + i, h, R, H, K * V) + inside, S_now, whole)
        tl.store(state_at(Ms, b, row + i, h, R, H, K * V) + inside, M_now, whole)
        x = tile(head(P1, b, token, h, T, H, H, K), live, d, K)
        y = tile(head(P2, b, token, h, T, H, H, K), live, d, K)
        w = tl.dot(x, S_now)
        w = tl.dot(y, M_now, w)
        w += tile(head(U, b, token, h, T, H, H, V), live, e, V).to(tl.float32)
        put(head(W, b, token, h, T, H, H, V), w, live, e, V)
        keys = tl.trans(tile(head(k, b, token, h, T, H, H, K), live, d, K))
        to_S = (w * -tl.load(said + t)[:, None]).to(keys.dtype)
        to_M = (w * tl.load(said + C + t)[:, None]).to(keys.dtype)
        S = tl.dot(keys, to_S, S * kept - M * mixed)
        M = tl.dot(keys, to_M, M * held)
    tl.store(S_end + at, S, whole)
    tl.store(M_end + at, M, whole)


@triton.jit(do_not_specialize=SIZES)
def backwards_kernel(
    q, p, do, E1, E2, DY, rates, dS_end, dM_end, documents, DV, dSs, dMs, dS0, dM0, T, R, N, scale, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, HAS_END: tl.constexpr,
    ROWED: tl.constexpr,
):  # fmt: skip
    """dv of all tokens, dS and dM behind each chunk, and the gradients of the first states."""
    b, h, n, row, count, start, end = place(documents, N, H, ROWED)
    d = tl.arange(0, BK)
    t = tl.arange(0, C)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    at, whole = columns(n, h, e, H, K, V, BK)
    S = tl.zeros([BK, BV], tl.float32)
    M = tl.zeros([BK, BV], tl.float32)
    if HAS_END:
        S += tl.load(dS_end + at, whole, other=0.0)
        M += tl.load(dM_end + at, whole, other=0.0)
    inside = d[:, None] * V + e[None, :]
    for j in range(count):
        i = count - 1 - j
        token = start + i * C + t
        live = token < end
        said = rates_at(rates, b, row + i, h, R, H, C)
        kept = tl.load(said + 6 * C)
        mixed = tl.load(said + 6 * C + 1)
        held = tl.load(said + 6 * C + 2)
        S_now = S.to(dSs.dtype.element_ty)
        M_now = M.to(dMs.dtype.element_ty)
        tl.store(state_at(dSs, b, row + i, h, R, H, K * V) + inside, S_now, whole)
        tl.store(state_at(dMs, b, row + i, h, R, H, K * V) + inside, M_now, whole)
        x = tile(head(E1, b, token, h, T, H, H, K), live, d, K)
        y = tile(head(E2, b, token, h, T, H, H, K), live, d, K)
        dy = tl.dot(x, S_now)
        dy = tl.dot(y, M_now, dy)
        dy += tile(head(DY, b, token, h, T, H, H, V), live, e, V).to(tl.float32)
        put(head(DV, b, token, h, T, H, H, V), -dy, live, e, V)
        asks = tl.trans(tile(head(p, b, token, h, T, H, H, K), live, d, K))
        reads = tl.trans(tile(head(q, b, token, h, T, H, H, K), live, d, K))
        grad = tile(head(do, b, token, h, T, H, H, V), live, e, V).to(tl.float32) * scale
        M = M * held - S * mixed
        S = tl.dot(asks, (dy * tl.load(said + 2 * C + t)[:, None]).to(asks.dtype), S * kept)
        S = tl.dot(reads, (grad * tl.load(said + 4 * C + t)[:, None]).to(asks.dtype), S)
        M = tl.dot(asks, (dy * -tl.load(said + 3 * C + t)[:, None]).to(asks.dtype), M)
        M = tl.dot(reads, (grad * -tl.load(said + 5 * C + t)[:, None]).to(asks.dtype), M)
    tl.store(dS0 + at, S, whole)
    tl.store(dM0 + at, M, whole)


def forwards(
    call: ChunksCall, k: Tensor, parts: tuple[Tensor, Tensor, Tensor], rates: Tensor, S: Tensor | None, M: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:
    """w, the states before chunks and those behind documents. parts: what w is, as `before_forwards` gives it."""
    w, ends = call.tokens(call.V, dtype=call.wide), call.states()
    before = call.nodes(call.K, call.V), call.nodes(call.K, call.V)
    launch(
        forwards_kernel, call.walk_grid, k, *parts, rates, *filled(S, M, by=ends[0]), call.documents, w, *before,
        *ends, call.T, call.R, call.N, **call.walks, HAS_STATE=S is not None, num_stages=3,
    )  # fmt: skip
    return w, before, ends


def backwards(
    call: ChunksCall, x: Given, do: Tensor, parts: tuple[Tensor, Tensor, Tensor], rates: Tensor, dS: Tensor | None,
    dM: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:  # fmt: skip
    """dv, the gradients of the states behind chunks, and those of the first ones. parts: what dy is."""
    dv, starts = call.tokens(call.V, dtype=call.wide), call.states()
    behind = call.nodes(call.K, call.V), call.nodes(call.K, call.V)
    launch(
        backwards_kernel, call.walk_grid, x.q, x.p, do, *parts, rates, *filled(dS, dM, by=starts[0]), call.documents,
        dv, *behind, *starts, call.T, call.R, call.N, call.scale, **call.walks, HAS_END=dS is not None, num_stages=2,
    )  # fmt: skip
    return dv, behind, starts
