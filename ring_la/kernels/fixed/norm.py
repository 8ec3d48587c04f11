"""RMS norm's gradients, ``o = x / rms(x) ⊙ weight ⊙ act(gate)``: those of x and of the gate, and what runs of
tokens give to the weight's, in one order within the block. The forward pass is `fused.rms_norm`, a row by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.sizes import power_of_2

ELEMENTS, PARTS = 4096, 8
"""Numbers of a tile, and programs a block, each of which adds up its own tokens."""


@triton.jit
def norm_back_kernel(
    x, weight, gate, do, places, dx, dgate, sums, eps, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A part of a block: H rows a token. ROWS: of a full part, so that a shorter one adds in the same order."""
    block = tl.program_id(0) // PARTS
    begin = tl.load(places + block * 2).to(tl.int64) * H + tl.program_id(0) % PARTS * ROWS
    rows = tl.load(places + block * 2 + 1).to(tl.int64) * H
    d = tl.arange(0, BD)
    w = tl.load(weight + d, d < D, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BD], tl.float32)
    for first in range(0, ROWS, BR):
        i = begin + first + tl.arange(0, BR)
        live = ((i < rows) & (first + tl.arange(0, BR) < ROWS))[:, None] & (d < D)[None, :]
        at = i[:, None] * D + d[None, :]
        y = tl.load(x + at, live, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
        y = y * r
        g = tl.load(do + at, live, other=0.0).to(tl.float32)
        h = g * w
        if GATED:
            z = tl.load(gate + at, live, other=0.0).to(tl.float32)
            s = tl.sigmoid(z)
            a = z * s if SILU else s
            slope = s * (1 + z * (1 - s)) if SILU else s * (1 - s)
            tl.store(dgate + at, (h * y * slope).to(dgate.dtype.element_ty), live)
            g *= a
            h *= a
        total += tl.sum(g * y, 0)
        back = r * (h - y * (tl.sum(h * y, 1) / D)[:, None])
        tl.store(dx + at, back.to(dx.dtype.element_ty), live)
    tl.store(sums + tl.program_id(0) * D + d, total, d < D)


def norm_gradients(
    do: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, places: Tensor, silu: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``x [B, T, …, D]`` and of the gate, and parts of the weight's, fp32 ``[n, D]``.

    Args:
        places: int32 ``[blocks, 2]``, the first token of each and the one behind it, in ``[B · T]``.
    """
    do, x, weight = aligned(do), aligned(x), aligned(weight)
    gate = None if gate is None else aligned(gate)
    D, H = x.shape[-1], x.shape[2:-1].numel()
    dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
    sums = torch.empty(len(places) * PARTS, D, device=x.device)
    block = power_of_2(D)
    if len(places):
        launch(
            norm_back_kernel, (len(places) * PARTS,), x, weight, x if gate is None else gate, do, places, dx,
            dx if dgate is None else dgate, sums, eps, H=H, D=D, BR=max(1, ELEMENTS // block), BD=block,
            ROWS=64 // PARTS * H, PARTS=PARTS, GATED=gate is not None, SILU=silu,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return dx, sums, dgate
