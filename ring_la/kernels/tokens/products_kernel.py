"""Products of a row with weights that lie as nn.Linear has them: each weight is read once a row, by one launch.

    out[i] = r Σ_d w[i, d] x[d] c[d],     r = rsqrt(mean_d x[d]² + eps), c the norm's weight

where there is a norm; else r = c = 1. The norm's sum is taken beside the product's, so nothing waits for it. `out` is
that of several weights side by side; or SiLU of the first half of one weight's rows times the second; or has something
added. Sums are fp32, and what is written is rounded once.

A program has its first tile of weights on its way before the launch before it has ended (`runtime.early`), and each
tile while it multiplies the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.early import options, others_may_begin
from ring_la.kernels.runtime.launch import launch

WEIGHTS = 4
"""Side by side, at most."""
TILE = (4, 512, 4)
"""Rows of a weight and channels of a program's tile, and its warps (benchmarks.tuning.products)."""


@triton.jit(do_not_specialize=("D0", "D1", "D2", "D3"))
def _products(
    X, C, W0, W1, W2, W3, ADD, OUT, eps, D0, D1, D2, D3, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BR rows of one weight ``[Di, D]`` (SWIGLU: and those as far behind its middle), for one row of x."""
    p, n = tl.program_id(0), tl.program_id(1)
    X += n * D
    ADD += n * (D0 + D1 + D2 + D3)
    OUT += n * (D0 + D1 + D2 + D3)
    t0, t1, t2 = tl.cdiv(D0, BR), tl.cdiv(D1, BR), tl.cdiv(D2, BR)
    w, size, first, at = W0, D0, 0, p
    if p >= t0 + t1 + t2:
        w, size, first, at = W3, D3, D0 + D1 + D2, p - t0 - t1 - t2
    elif p >= t0 + t1:
        w, size, first, at = W2, D2, D0 + D1, p - t0 - t1
    elif p >= t0:
        w, size, first, at = W1, D1, D0, p - t0
    r, d = at * BR + tl.arange(0, BR), tl.arange(0, BD)
    row, live = r.to(tl.int64)[:, None] * D, (r < size)[:, None]
    total, other = tl.zeros((BR, BD), tl.float32), tl.zeros((BR, BD), tl.float32)
    square = tl.zeros((BD,), tl.float32)
    part = tl.load(w + row + d[None, :], live & (d < D)[None, :], other=0.0)
    if SWIGLU:
        behind = w + size.to(tl.int64) * D
        second = tl.load(behind + row + d[None, :], live & (d < D)[None, :], other=0.0)
    if EARLY:
        others_may_begin()
    for begin in range(0, D, BD):
        c = begin + d
        x = tl.load(X + c, c < D, other=0.0).to(tl.float32)
        if NORM:
            square += x * x
            x *= tl.load(C + c, c < D, other=0.0).to(tl.float32)
        total += part.to(tl.float32) * x[None, :]
        c += BD
        inside = live & (c < D)[None, :]
        part = tl.load(w + row + c[None, :], inside, other=0.0)
        if SWIGLU:
            other += second.to(tl.float32) * x[None, :]
            second = tl.load(behind + row + c[None, :], inside, other=0.0)
    out = tl.sum(total, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(square, 0) / D + eps)
        out *= scale
    if SWIGLU:
        up = tl.sum(other, 1) * scale if NORM else tl.sum(other, 1)
        out = out / (1 + tl.exp(-out)) * up
    if ADDED:
        out += tl.load(ADD + first + r, r < size, other=0.0).to(tl.float32)
    tl.store(OUT + first + r, out.to(OUT.dtype.element_ty), r < size)


def products(
    x: Tensor,
    weights: Sequence[Tensor],
    norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    swiglu: bool = False,
    added: Tensor | None = None,
    tile: tuple[int, int, int] = TILE,
    begins: bool = True,
) -> Tensor:
    """``x [N, D]`` of any dtype with weights ``[Di, D]``: ``[N, Σ Di]`` in theirs; all contiguous. See the module's
    text.

    Args:
        norm: the norm's weight ``[D]``. eps: the norm's. swiglu: of one weight, whose rows are halved.
        added: ``[N, Σ Di]``. tile: as `TILE`. begins: before the launch before it has ended, where GPUs can.
    """
    (N, D), halves, missing = x.shape, 2 if swiglu else 1, WEIGHTS - len(weights)
    sizes, given = [w.shape[0] // halves for w in weights] + [0] * missing, [*weights, *[weights[0]] * missing]
    BR, BD, warps = tile
    BR = max(1, BR // halves)
    out = torch.empty(N, sum(sizes), dtype=weights[0].dtype, device=x.device)
    launch(
        _products, (sum(triton.cdiv(size, BR) for size in sizes), N),
        x, x if norm is None else norm, *given, x if added is None else added, out, eps, *sizes, D=D, BR=BR, BD=BD,
        NORM=norm is not None, SWIGLU=swiglu, ADDED=added is not None, num_warps=warps, tensors="any",
        **options(x, begins),
    )  # fmt: skip
    return out
