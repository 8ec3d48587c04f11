"""A new token's queries turned by its position, its keys turned and written where they stay, its values written: one
launch for all heads of all sequences.

Halves are paired as GPT-NeoX does. An angle is formed in turns in fp64, of which fp32 gets what is behind the point.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.runtime.early import options, others_may_begin
from ..kernels.runtime.launch import launch
from ..kernels.sizes import power_of_2


@triton.jit(do_not_specialize=("x_n", "columns"))
def _turned(
    X, AT, POSITION, Q, KEYS, VALUES, x_n, columns, H: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr,
    BD: tl.constexpr, LOG: tl.constexpr, TURN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: of its queries, keys or values."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BD)
    live = d < HALF
    if EARLY:
        others_may_begin()
    x = X + n * x_n + h * (2 * HALF) + d
    a, b = tl.load(x, live, other=0.0), tl.load(x + HALF, live, other=0.0)
    if TURN and h < H + HK:
        turns = tl.exp2(d.to(tl.float64) * (-LOG / HALF)) * (1 / 6.283185307179586)
        turns *= tl.load(POSITION + n).to(tl.float64)
        angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
        cos, sin = tl.cos(angle), tl.sin(angle)
        left, right = a.to(tl.float32), b.to(tl.float32)
        a = (left * cos - right * sin).to(X.dtype.element_ty)
        b = (right * cos + left * sin).to(X.dtype.element_ty)
    if h < H:
        out = Q + (n * H + h) * (2 * HALF) + d
        tl.store(out, a, live)
        tl.store(out + HALF, b, live)
    else:
        row = ((n * HK + (h - H) % HK) * columns + tl.load(AT + n)) * (2 * HALF) + d
        memory = KEYS if h < H + HK else VALUES
        tl.store(memory + row, a.to(KEYS.dtype.element_ty), live)
        tl.store(memory + row + HALF, b.to(KEYS.dtype.element_ty), live)


def turned_and_written(
    qkv: Tensor, at: Tensor, position: Tensor, keys: Tensor, values: Tensor, base: float | None
) -> Tensor:
    """Turned queries ``[N, H, K]``; keys and values are written into ``keys, values [size, HK, columns, K]``.

    Args:
        qkv: ``[N, (H + 2 HK) K]``, rows any distance apart. at: each row's column. position: each row's; both int64
            ``[N]``. base: of the rotary positions; None: nothing is turned.
    """
    (N, width), (_, HK, columns, K) = qkv.shape, keys.shape
    H = width // K - 2 * HK
    q = torch.empty(N, H, K, dtype=qkv.dtype, device=qkv.device)
    launch(
        _turned, (N, H + 2 * HK), qkv, at, position, q, keys, values, qkv.stride(0), columns, H=H, HK=HK, HALF=K // 2,
        BD=power_of_2(K // 2), LOG=0.0 if base is None else math.log2(base), TURN=base is not None, num_warps=2,
        tensors="any", **options(qkv),
    )  # fmt: skip
    return q
