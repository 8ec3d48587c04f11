"""The kernels of `shares`: a program has some channels of one document and goes over its tokens, a tile at a time.

With s the shares, and R_t what z_t gets from itself and all later ones:

    a_t = dg_{t+1} − dg_t − s_t ds_t,        R_t = a_t + e^{g_{t+1}} R_{t+1},        dx_t = s_t (ds_t + R_t)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.runtime.launch import filled, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.sums.walks import joined

TOKENS, CHANNELS, WARPS = 64, 16, 4
"""Tile of a program."""


def unsupported(x: Tensor, *others: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    wide = [t.dtype for t in (x, *others) if t.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    return f"dtype {wide[0]}" if wide else "" if x.numel() else "no tokens"


@triton.jit
def added(m, s, n, r):
    """The sum of ``s e^m`` and ``r e^n``, as the larger exponent and what it multiplies."""
    top = tl.maximum(m, n)
    return top, s * tl.exp(m - top) + r * tl.exp(n - top)


@triton.jit
def document(cu, T, D: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr):
    """(first token of all B · T, tokens, number of the document, channels, which of them there are) of a program."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    d = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    p = (tl.program_id(0) // blocks).to(tl.int64)
    if PACKED:
        start = tl.load(cu + p).to(tl.int64)
        n = tl.load(cu + p + 1).to(tl.int64) - start
    else:
        start = p * T
        n = p * 0 + T
    return start, n, p, d, d < D


@triton.jit(do_not_specialize=("T",))
def shares_kernel(x, z, cu, share, g, end, T, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr):
    """Shares and log-decays of one document, and z after it."""
    start, n, p, d, inside = document(cu, T, D, BD, PACKED)
    t = tl.arange(0, C)
    before = tl.load(z + p * D + d, inside, other=0.0).to(tl.float32)
    for i in range(0, tl.cdiv(n, C)):
        live = (t < n - i * C)[:, None] & inside[None, :]
        place = (start + i * C + t)[:, None] * D + d[None, :]
        y = tl.load(x + place, live, other=-3e38).to(tl.float32)
        m, s = tl.associative_scan((y, tl.where(live, 1.0, 0.0)), 0, added)
        m, s = added(m, s, before[None, :], 1.0)
        sums = m + tl.log(s)
        part = tl.minimum(tl.exp(y - sums), 1.0 - 5.9604645e-08)
        small = -part * (1.0 + part * (0.5 + part * (1.0 / 3 + part * 0.25)))
        tl.store(share + place, part.to(share.dtype.element_ty), live)
        tl.store(g + place, tl.where(part < 0.01, small, tl.log(1.0 - part)), live)
        before = tl.sum(tl.where((t == C - 1)[:, None], sums, 0.0), 0)
    tl.store(end + p * D + d, before, inside)


@triton.jit(do_not_specialize=("T",))
def shares_backward_kernel(
    dshare, dg, dend, g, cu, dx, dz, T, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    SHARE: tl.constexpr, GATE: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """The gradients, right to left."""
    start, n, p, d, inside = document(cu, T, D, BD, PACKED)
    t = tl.arange(0, C)
    R = tl.zeros([BD], tl.float32)
    if END:
        R += tl.load(dend + p * D + d, inside, other=0.0).to(tl.float32)
    for step in range(0, tl.cdiv(n, C)):
        i = n - 1 - step * C - t  # rows from right to left
        live = (i >= 0)[:, None] & inside[None, :]
        follows = live & (i < n - 1)[:, None]
        place = (start + i)[:, None] * D + d[None, :]
        gate = tl.load(g + place, live, other=0.0)
        small = -gate * (1.0 + gate * (0.5 + gate * (1.0 / 6 + gate * (1.0 / 24))))
        part = tl.where(gate > -0.01, small, 1.0 - tl.exp(gate))
        ds = tl.zeros([C, BD], tl.float32)
        if SHARE:
            ds += tl.load(dshare + place, live, other=0.0).to(tl.float32)
        a = -part * ds
        if GATE:
            a += tl.load(dg + place + D, follows, other=0.0) - tl.load(dg + place, live, other=0.0)
        kept = tl.exp(tl.load(g + place + D, follows, other=0.0))
        kept, own = tl.associative_scan((kept, a), 0, joined)
        found = kept * R[None, :] + own
        tl.store(dx + place, (part * (ds + found)).to(dx.dtype.element_ty), live)
        R = tl.sum(tl.where((t == C - 1)[:, None], found, 0.0), 0)
    some = inside & (n > 0)
    first = start * D + d
    if GATE:
        R = tl.where(n > 0, R * tl.exp(tl.load(g + first, some, other=0.0)) + tl.load(dg + first, some, other=0.0), R)
    else:
        R = tl.where(n > 0, R * tl.exp(tl.load(g + first, some, other=0.0)), R)
    tl.store(dz + p * D + d, R, inside)


def _launching(x: Tensor, cu: Tensor | None) -> tuple[tuple[int], int, dict[str, Any]]:
    """Grid, documents, constants."""
    D, N = x.shape[2], x.shape[0] if cu is None else cu.shape[0] - 1
    return (N * cdiv(D, CHANNELS),), N, dict(D=D, BD=CHANNELS, C=TOKENS, PACKED=cu is not None, num_warps=WARPS)


@replayed(3)
def forward(x: Tensor, z: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Shares in x's dtype and log-decays in fp32 ``[B, T, D]``, and z after each document ``[N, D]``."""
    grid, N, how = _launching(x, cu)
    share, g = torch.empty_like(x), x.new_empty(x.shape, dtype=torch.float32)
    end = x.new_empty(N, x.shape[2], dtype=torch.float32)
    launch(shares_kernel, grid, *filled(x, z, cu), share, g, end, x.shape[1], **how)
    return share, g, end


@replayed(6)
def backward(
    dshare: Tensor | None, dg: Tensor | None, dend: Tensor | None, x: Tensor, g: Tensor, cu: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, in fp32, of z."""
    grid, N, how = _launching(x, cu)
    dx, dz = torch.empty_like(x), x.new_empty(N, x.shape[2], dtype=torch.float32)
    launch(
        shares_backward_kernel, grid, *filled(dshare, dg, dend, g, cu, by=g), dx, dz, x.shape[1], **how,
        SHARE=dshare is not None, GATE=dg is not None, END=dend is not None,
    )  # fmt: skip
    return dx, dz
