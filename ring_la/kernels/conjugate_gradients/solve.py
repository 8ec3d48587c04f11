"""The kernels: states before chunks, and the solver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kept import recent
from ring_la.kernels.fenwick.device import chunk_row, node_at, put, state_at, tile
from ring_la.kernels.fenwick.table import table_of
from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.sizes import width
from ring_la.kernels.triton.tiles import head

SIZES = ("T", "R", "N")
CHUNK = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Tokens a chunk."""
FINER = 64
"""A residual is nothing where it is so much smaller than the dtype's rounding."""


@triton.jit(do_not_specialize=SIZES)
def before_kernel(
    K_, g, beta, H0, table, begins, out, T, R, N, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, HAS_STATE: tl.constexpr, ROWS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """H before each chunk of one document, BV of its columns."""
    n = tl.program_id(0) % N
    h = tl.program_id(0) // N % H
    b = tl.program_id(0) // (N * H)
    d = tl.arange(0, BK)
    e = tl.program_id(1) * BV + tl.arange(0, BV)
    t = tl.arange(0, C)
    whole = (d < K)[:, None] & (e < K)[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_STATE:
        document = b if ROWS else n
        S += tl.load(H0 + (document.to(tl.int64) * H + h) * K * K + d[:, None] * K + e[None, :], whole, other=0.0)
    row = tl.load(begins + n)
    count = tl.load(begins + n + 1) - row
    for i in range(count):
        place, _, end, _, _, _ = chunk_row(table, row + i)
        token = place + t
        live = token < end
        into = state_at(out, b, row + i, h, R, H, K * K) + d[:, None] * K + e[None, :]
        tl.store(into, S.to(out.dtype.element_ty), whole)
        x = tile(head(K_, b, token, h, T, H, H, K), live, d, K)
        y = tile(head(K_, b, token, h, T, H, H, K), live, e, K).to(tl.float32)
        c = tl.cumsum(tl.load(head(g, b, token, h, T, H, H, 1), live, other=0.0).to(tl.float32), 0)
        total = tl.sum(tl.where(t == C - 1, c, 0.0), 0)
        weight = tl.exp(total - c) * tl.load(head(beta, b, token, h, T, H, H, 1), live, other=0.0).to(tl.float32)
        S = tl.dot(tl.trans(x), (y * weight[:, None]).to(x.dtype), S * tl.exp(total), input_precision=PREC)


@triton.jit
def times(p, k, S, W, kept, ridge, PREC: tl.constexpr):
    """(H + diag λ) p of each token of a chunk."""
    inner = tl.dot(p.to(k.dtype), tl.trans(k), input_precision=PREC) * W
    y = tl.dot(inner.to(k.dtype), k, input_precision=PREC)
    y = tl.dot((p * kept[:, None]).to(k.dtype), S, y, input_precision=PREC)
    return y + p * ridge


@triton.jit
def over(a, b):
    """a / b, zero where there is nothing left."""
    return tl.where(b > 1e-30, a / tl.maximum(b, 1e-30), 0.0)


@triton.jit(do_not_specialize=(*SIZES, "steps"))
def solve_kernel(
    Q, K_, g, beta, lam, table, states, X, T, R, steps, scale, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, LEAST: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """x of one chunk, after so many steps or when no token's residual is above `LEAST` of what it began with."""
    row = tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    place, _, end, _, _, _ = chunk_row(table, row)
    d = tl.arange(0, BK)
    t = tl.arange(0, C)
    token = place + t
    live = token < end
    k = tile(head(K_, b, token, h, T, H, H, K), live, d, K)
    r = tile(head(Q, b, token, h, T, H, H, K), live, d, K).to(tl.float32) * scale
    c = tl.cumsum(tl.load(head(g, b, token, h, T, H, H, 1), live, other=0.0).to(tl.float32), 0)
    rate = tl.load(head(beta, b, token, h, T, H, H, 1), live, other=0.0).to(tl.float32)
    S = node_at(states, b, row, h, R, d, d, H, K, K)
    ridge = tl.load(lam + h * K + d, d < K, other=1.0).to(tl.float32)[None, :]
    W = tl.exp(tl.where(t[:, None] >= t[None, :], c[:, None] - c[None, :], float("-inf"))) * rate[None, :]
    kept = tl.exp(c)
    x = tl.zeros([C, BK], tl.float32)
    p = r
    size = tl.sum(r * r, 1)
    least = size * LEAST
    todo = steps
    while todo > 0:
        y = times(p, k, S, W, kept, ridge, PREC)
        step = over(size, tl.sum(p * y, 1))
        x += step[:, None] * p
        r -= step[:, None] * y
        left = tl.sum(r * r, 1)
        p = r + over(left, size)[:, None] * p
        size = left
        todo = tl.where(tl.max((left > least).to(tl.int32), 0) > 0, todo - 1, 0)
    put(head(X, b, token, h, T, H, H, K), x, live, d, K)


@recent(256)
def _begins(cu: tuple[int, ...], chunk: int, device: torch.device) -> Tensor:
    """The row of each document's first chunk, and how many there are."""
    rows = [0]
    for a, b in zip(cu, cu[1:]):
        rows.append(rows[-1] - (a - b) // chunk)
    return torch.tensor(rows, dtype=torch.int32).to(device)


class System(NamedTuple):
    """k ``[B, T, H, K]``, g and beta ``[B, T, H]``, lam ``[H, K]``, and H before each document ``[N, H, K, K]`` in fp32
    (None: zero), all contiguous."""

    k: Tensor
    g: Tensor
    beta: Tensor
    lam: Tensor
    H0: Tensor | None


def solved(q: Tensor, system: System, cu: Sequence[int], steps: int, scale: float = 1.0) -> Tensor:
    """x ``[B, T, H, K]`` like k, of right sides scale · q, q like k. cu: offsets of documents in each row."""
    k, g, beta, lam, H0 = system
    (B, T, H, K), C, N = k.shape, CHUNK[k.dtype], len(cu) - 1
    table, _ = table_of(tuple(n for a, b in zip(cu, cu[1:]) if b > a for n in (a, b, 0)), C, k.device)
    R, wide = table.shape[0], width(K)
    how: dict[str, Any] = dict(H=H, K=K, BK=wide, C=C, PREC="tf32x3" if k.dtype == torch.float32 else "tf32")
    states, x = k.new_empty(B, R, H, K, K), k.new_empty(k.shape)
    block = min(wide, 64)
    launch(
        before_kernel, (B * H * N, -(-K // block)), *filled(k, g, beta, H0, table, _begins(tuple(cu), C, k.device)),
        states, T, R, N, BV=block, HAS_STATE=H0 is not None, ROWS=B > 1, num_warps=4, num_stages=2, **how,
    )  # fmt: skip
    warps = 8 if wide > 64 else 4
    least = (torch.finfo(k.dtype).eps / FINER) ** 2
    launch(
        solve_kernel, (R, B * H), q, k, g, beta, lam, table, states, x, T, R, steps, scale, LEAST=least,
        num_warps=warps, **how,
    )  # fmt: skip
    return x
