"""Gradients of value heads summed over those that share a q/k head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS = 4096
"""Of a program's tile."""


@triton.jit
def _sum(x, out, row, count, G: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    k = tl.arange(0, BK)[None, :]
    live = (row < count) & (k < K)
    total = tl.zeros([BR, BK], tl.float32)
    for g in tl.static_range(G):
        total += tl.load(x + (row * G + g) * K + k, live, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, total.to(out.dtype.element_ty), live)


@triton.jit(do_not_specialize=("count",))
def sum_kernel(
    x, y, x_out, y_out, count, EACH: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Groups of G rows of K channels to one each, of x and (EACH 2) of y; the last first, which L2 may hold."""
    i = tl.num_programs(0) // EACH - 1 - tl.program_id(0) // EACH
    row = i.to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    if tl.program_id(0) % EACH == 0:
        _sum(x, x_out, row, count, G, K, BR, BK)
    else:
        _sum(y, y_out, row, count, G, K, BR, BK)


def summed(grads: Sequence[Tensor], heads: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """One or two gradients ``[B, T, H, K]`` to ``[B, T, heads, K]`` in `dtypes`, summed in fp32."""
    B, T, H, K = grads[0].shape
    out = [torch.empty(B, T, heads, K, dtype=dtype, device=grads[0].device) for dtype in dtypes]
    if count := B * T * heads:
        BK = power_of_2(K)
        BR = max(1, ELEMENTS // BK)
        x, y = (aligned(grads[i]) for i in (0, -1))
        launch(
            sum_kernel, (len(out) * cdiv(count, BR),), x, y, out[0], out[-1], count, EACH=len(out), G=H // heads, K=K,
            BR=BR, BK=BK,
        )  # fmt: skip
    return out


def by_key_head(grads: Inputs, heads: int) -> Inputs:
    """Gradients whose dq and dk are of value heads, with those summed over the heads that share one of q and k."""
    q, k = grads.q, grads.k
    if q.shape[2] == heads:
        return grads
    dq, dk = summed((q, k), heads, (q.dtype, k.dtype))
    return grads._replace(q=dq, k=dk)
