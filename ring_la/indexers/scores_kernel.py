"""Scores of the lightning indexer in one pass: heads are summed where they are formed, and only the sum is written."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.runtime.launch import launch
from ..softmax.merging.parts import dense

TILE: dict[str, Any] = dict(BM=64, BN=64, num_warps=4, num_stages=3)
"""Queries and keys of a program: on an H200 the fastest of eight, 225 TFLOP/s with 4 heads of 128."""


@triton.jit(do_not_specialize=("n", "m", "first", "heads"))
def _scores(
    Q, K, W, TOKENS, STARTS, OUT, n, m, first, heads, width,
    q_b, q_t, q_h, k_b, k_t, w_b, w_t, w_h,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT ``[B, n, m]`` of BM queries and BN keys, whose places begin at `first`; −∞ where a query may not choose."""
    b = tl.program_id(2).to(tl.int64)
    rows, keys, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BD)
    tokens = tl.load(TOKENS + rows, mask=rows < n, other=-1)
    starts = tl.load(STARTS + rows, mask=rows < n, other=0)
    total = tl.zeros((BM, BN), tl.float32)
    if first + tl.program_id(1) * BN <= tl.max(tokens, 0):
        k = K + b * k_b + keys[:, None].to(tl.int64) * k_t + d[None, :]
        k = tl.load(k, mask=(keys < m)[:, None] & (d < width)[None, :], other=0.0)
        row = Q + b * q_b + rows[:, None].to(tl.int64) * q_t + d[None, :]
        of_row = W + b * w_b + rows.to(tl.int64) * w_t
        for h in range(heads):
            q = tl.load(row + h * q_h, mask=(rows < n)[:, None] & (d < width)[None, :], other=0.0)
            w = tl.load(of_row + h * w_h, mask=rows < n, other=0.0).to(tl.float32)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            total += tl.maximum(s, 0.0) * w[:, None]
    place = (first + keys)[None, :]
    total = tl.where((place <= tokens[:, None]) & (place >= starts[:, None]), total, -float("inf"))
    into = OUT + (b * n + rows[:, None]) * m + keys[None, :]
    tl.store(into, total, mask=(rows < n)[:, None] & (keys < m)[None, :])


def scores(q: Tensor, k: Tensor, w: Tensor, tokens: Tensor, starts: Tensor, first: int) -> Tensor:
    """Fp32 ``[B, n, m]`` of ``q [B, n, Hi, D]``, ``k [B, m, D]`` and ``w [B, n, Hi]``.

    Args:
        tokens, starts: the place of each query and of the first token of its document, int64 ``[n]``.
        first: of the keys.
    """
    q, k = dense(q), dense(k)
    (B, n, heads, D), m = q.shape, k.shape[1]
    out = torch.empty(B, n, m, dtype=torch.float32, device=q.device)
    wide = q.dtype == torch.float32
    if out.numel():
        launch(
            _scores, (-(-n // TILE["BM"]), -(-m // TILE["BN"]), B),
            q, k, w, tokens.contiguous(), starts.contiguous(), out, n, m, first, heads, D,
            *q.stride()[:3], *k.stride()[:2], *w.stride(),
            BD=max(16, triton.next_power_of_2(D)), PRECISION="ieee" if wide else "tf32", **TILE, tensors="any",
        )  # fmt: skip
    return out
