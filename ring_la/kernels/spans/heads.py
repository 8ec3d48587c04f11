"""Gradients of value heads summed over those that share a q/k head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.spans.table import cdiv, power_of_2

ELEMENTS = 4096
"""Of a program's tile."""


@triton.jit(do_not_specialize=("count",))
def sum_kernel(x, out, count, G: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """Groups of G rows of K channels to one each."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    k = tl.arange(0, BK)[None, :]
    live = (row < count) & (k < K)
    total = tl.zeros([BR, BK], tl.float32)
    for g in tl.static_range(G):
        total += tl.load(x + (row * G + g) * K + k, live, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, total.to(out.dtype.element_ty), live)


def summed(grad: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, K]`` to ``[B, T, heads, K]`` in `dtype`, summed in fp32."""
    B, T, H, K = grad.shape
    out = torch.empty(B, T, heads, K, dtype=dtype, device=grad.device)
    if count := B * T * heads:
        BK = power_of_2(K)
        BR = max(1, ELEMENTS // BK)
        launch(sum_kernel, (cdiv(count, BR),), aligned(grad), out, count, G=H // heads, K=K, BR=BR, BK=BK)
    return out
