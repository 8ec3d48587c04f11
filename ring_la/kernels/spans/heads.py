"""Gradients of value heads summed over those that share a q/k head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.spans.table import cdiv

BLOCK = 2048
"""Elements of a program's tile."""


@triton.jit(do_not_specialize=("count",))
def sum_kernel(x, out, count, G: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Groups of G rows of K channels to one each."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = i // K * (G * K) + i % K
    total = tl.zeros([BLOCK], tl.float32)
    for g in tl.static_range(G):
        total += tl.load(x + first + g * K, i < count, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), i < count)


def summed(grad: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, K]`` to ``[B, T, heads, K]`` in `dtype`, summed in fp32."""
    B, T, H, K = grad.shape
    out = torch.empty(B, T, heads, K, dtype=dtype, device=grad.device)
    if count := out.numel():
        launch(sum_kernel, (cdiv(count, BLOCK),), aligned(grad), out, count, G=H // heads, K=K, BLOCK=BLOCK)
    return out
