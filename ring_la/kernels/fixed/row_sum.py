"""``Σ_d x[…, d]``, a row's bits whatever rows there are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS, WIDE = 4096, 4096
"""Numbers of a tile, and columns of it at most."""


@triton.jit(do_not_specialize=("rows",))
def row_sum_kernel(x, out, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    total = tl.zeros([BR, BD], tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        total += tl.load(x + i[:, None] * D + d[None, :], (i < rows)[:, None] & (d < D)[None, :], other=0.0)
    tl.store(out + i, tl.sum(total, 1), i < rows)


def sum_rows(x: Tensor) -> Tensor:
    """Sums ``[…]`` of ``x [..., D]``, fp32."""
    x, D = aligned(x), x.shape[-1]
    out = torch.zeros(x.shape[:-1], device=x.device)
    if x.numel():
        block = min(WIDE, power_of_2(D))
        tall = ELEMENTS // block
        launch(row_sum_kernel, (cdiv(out.numel(), tall),), x, out, out.numel(), D=D, BR=tall, BD=block, num_warps=4)
    return out
