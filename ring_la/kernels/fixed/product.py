"""``y = x W (+ bias)`` of which a row's bits do not depend on the other rows, nor on how many there are.

One tile for all numbers of rows, and one order along the sum, which no two programs share (the batch-invariant product
of He et al. 2025, "Defeating nondeterminism in LLM inference"). A row of a tensor core's tile is computed alike
wherever it stands in the tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fixed.library import library_product
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.triton_version import TensorDescriptor

ROWS, TALL = 128, 8
"""Rows of a tile, and tiles one below the other that are computed together."""
BY_LIBRARY = True
"""Whether cuBLAS may make products that `library` has checked."""
BY_DESCRIPTOR = True
"""Whether tiles come by descriptor where widths are multiples of 16, here and in `weight`."""
DESCRIBED = (128, 256, 64, 4)
"""Rows and columns of a tile, terms of the sum at a time and pipeline stages where tiles come by descriptor."""
COLUMNS = {True: (128, 128, 3), False: (256, 64, 4)}
"""Columns of a tile, terms of the sum at a time and pipeline stages for a transposed weight and another, from
benchmarks.tuning.fixed on an H200. Numbers of rows do not choose: terms at a time are part of the sum's order."""


@triton.jit(do_not_specialize=("M", "N", "K"))
def product_kernel(
    x, w, bias, y, M, N, K, UN: tl.constexpr, UK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One tile of y ``[M, N]``, N and K in units of UN and UK; w is ``[K, N]``, or TRANSPOSED ``[N, K]``."""
    N *= UN
    K *= UK
    down, across = (M + BM - 1) // BM, (N + BN - 1) // BN
    pid = tl.program_id(0)
    first = pid // (GROUP * across) * GROUP
    tall = tl.minimum(down - first, GROUP)
    i = (first + pid % (GROUP * across) % tall).to(tl.int64) * BM + tl.arange(0, BM)
    j = pid % (GROUP * across) // tall * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_ = x + i[:, None] * K + k[None, :]
    if TRANSPOSED:
        w_ = w + k[:, None] + j[None, :].to(tl.int64) * K
    else:
        w_ = w + k[:, None].to(tl.int64) * N + j[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for at in range(0, K, BK):
        left = tl.load(x_, (i < M)[:, None] & (k < K - at)[None, :], other=0.0)
        right = tl.load(w_, (k < K - at)[:, None] & (j < N)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PREC)
        x_ += BK
        w_ += BK if TRANSPOSED else BK * N
    if BIAS:
        acc += tl.load(bias + j, j < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + i[:, None] * N + j[None, :], acc.to(y.dtype.element_ty), (i < M)[:, None] & (j < N)[None, :])


@triton.jit(do_not_specialize=("M", "N", "K"))
def described_kernel(
    x, w, bias, y, M, N, K, UN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """`product_kernel` with tiles of x and w by descriptor: N in units of UN, K as it is."""
    N *= UN
    down, across = (M + BM - 1) // BM, (N + BN - 1) // BN
    pid = tl.program_id(0)
    first = pid // (GROUP * across) * GROUP
    tall = tl.minimum(down - first, GROUP)
    row = (first + pid % (GROUP * across) % tall) * BM
    column = pid % (GROUP * across) // tall * BN
    acc = tl.zeros([BM, BN], tl.float32)
    for at in range(0, K, BK):
        left = x.load([row, at])
        if TRANSPOSED:
            right = w.load([column, at]).T
        else:
            right = w.load([at, column])
        acc = tl.dot(left, right, acc, input_precision=PREC)
    i, j = row.to(tl.int64) + tl.arange(0, BM), column + tl.arange(0, BN)
    if BIAS:
        acc += tl.load(bias + j, j < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + i[:, None] * N + j[None, :], acc.to(y.dtype.element_ty), (i < M)[:, None] & (j < N)[None, :])


def row_product(x: Tensor, w: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """``x w + bias`` of ``x [..., K]`` and ``w [K, N]``, or its transpose ``[N, K]``; fp32 sums, in x's dtype."""
    x, w, K = aligned(x), aligned(w), x.shape[-1]
    N = w.shape[0] if transposed else w.shape[1]
    y = x.new_empty(*x.shape[:-1], N)
    rows = x.numel() // K if K else 0
    if not rows:
        return y
    if BY_LIBRARY and w.is_cuda and torch.version.hip is None:
        made = library_product(x.view(rows, K), w, None if bias is None else aligned(bias), transposed)
        if made is not None:
            return made.view(y.shape)
    described = BY_DESCRIPTOR and N > 64 and N % 16 == K % 16 == 0  # by the weight alone, never by the number of rows
    bm, bn, bk, stages = DESCRIBED if described else (ROWS, *COLUMNS[transposed])
    bn, un, uk = bn if N > 64 else 64, unit_of(N), unit_of(K)
    how: dict[str, Any] = dict(
        UN=un, BM=bm, BN=bn, BK=bk, GROUP=TALL, TRANSPOSED=transposed, BIAS=bias is not None, PREC="ieee",
        num_warps=8, num_stages=stages,
    )  # fmt: skip
    grid, bias = (-(-rows // bm) * -(-N // bn),), x if bias is None else aligned(bias)
    if described:
        of_x = TensorDescriptor(x.view(rows, K), [rows, K], [K, 1], [bm, bk])
        of_w = TensorDescriptor(w, list(w.shape), [w.shape[1], 1], [bn, bk] if transposed else [bk, bn])
        launch(described_kernel, grid, of_x, of_w, bias, y, rows, N // un, K, **how)
    else:
        launch(product_kernel, grid, x, w, bias, y, rows, N // un, K // uk, UK=uk, **how)
    return y


def unit_of(size: int) -> int:
    """What a size is passed in, so that a kernel knows of rows on 16-byte boundaries and is compiled once for them."""
    return 16 if size % 16 == 0 else 1
