"""Cross-entropy of rows of logits, which their gradient ``softmax − onehot(target)`` overwrites: two reads, a write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.sizes import power_of_2

COLUMNS, WARPS = 4096, 8
"""Of a program's tile: one row at a time."""


def unsupported(logits: Tensor) -> str:
    """Why this kernel cannot take a call, or an empty string."""
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {logits.dtype}"
    return "" if logits.is_contiguous() and logits.data_ptr() % 16 == 0 else "rows that lie apart"


@triton.jit(do_not_specialize=("ignored",))
def cross_entropy_kernel(logits, targets, losses, ignored, V: tl.constexpr, BV: tl.constexpr, BACK: tl.constexpr):
    """A row of V logits: its loss, 0 where the target is `ignored`, and (BACK) the gradient in its place."""
    i = tl.program_id(0).to(tl.int64)
    row, target = logits + i * V, tl.load(targets + i)
    most = tl.full([BV], -1e30, tl.float32)  # by lane, and what is past the end: finite, so that no difference is NaN
    total = tl.zeros([BV], tl.float32)
    hit = tl.zeros([BV], tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        x = tl.load(row + c, c < V, other=-1e30).to(tl.float32)
        more = tl.maximum(most, x)
        total = total * tl.exp(most - more) + tl.exp(x - more)
        hit += tl.where(c == target, x, 0.0)
        most = more
    top = tl.max(most, 0)
    size = tl.log(tl.sum(total * tl.exp(most - top), 0))  # apart from `top`, which may be large
    live = target != ignored
    tl.store(losses + i, tl.where(live, size - (tl.sum(hit, 0) - top), 0.0))
    if BACK:
        for first in range(0, V, BV):
            c = first + tl.arange(0, BV)
            x = tl.load(row + c, c < V, other=0.0).to(tl.float32)
            d = tl.where(live, tl.exp(x - top - size) - tl.where(c == target, 1.0, 0.0), 0.0)
            tl.store(row + c, d.to(logits.dtype.element_ty), c < V)


def forward(logits: Tensor, targets: Tensor, ignored: int, wanted: bool) -> Tensor:
    """The rows' losses, fp32 ``[N]``; `logits` ``[N, V]`` becomes their gradient if it is `wanted`."""
    rows, V = logits.shape
    losses = torch.empty(rows, device=logits.device)
    if rows:
        block = min(COLUMNS, max(16, power_of_2(V)))
        launch(
            cross_entropy_kernel, (rows,), logits, aligned(targets), losses, ignored, V=V, BV=block, BACK=wanted,
            num_warps=WARPS,
        )  # fmt: skip
    return losses
