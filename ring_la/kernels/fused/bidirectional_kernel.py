"""What tokens read from their piece's state, ``o_t = scale · Sᵀ x_t`` or ``scale · S x_t``: one product a chunk; or the
first over a denominator. That takes states as they are, in fp32: of bf16 tokens by two products, with the state's upper
and lower 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.kernels.families import recurrence
from ring_la.kernels.protocol import Backward, Inputs
from ring_la.kernels.runtime.launch import aligned, filled, launch
from ring_la.kernels.sizes import cdiv, width
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.triton.tiles import SIZES, head, put, span, tile

RULE = Rule("additive", "none")
CHUNK, CHUNKS, COLUMNS = 64, 8, 128
"""Tokens a product, products a program, and columns of the result a program takes."""


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    x, S, o, table, T, N, LENGTH, scale, H: tl.constexpr, HX: tl.constexpr, DX: tl.constexpr, DO: tl.constexpr,
    BX: tl.constexpr, BO: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr, PREC: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """LENGTH tokens of a piece and head, BO columns of o; S [B, N, H, DX, DO], or TRANSPOSED [B, N, H, DO, DX]."""
    NO: tl.constexpr = (DO + BO - 1) // BO
    s = tl.program_id(0) // NO
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, _, _, _ = span(table, s, T, LENGTH, C, VARLEN)
    if end <= start:
        return
    d = tl.arange(0, BX)
    e = tl.program_id(0) % NO * BO + tl.arange(0, BO)
    t = tl.arange(0, C)
    at = e[None, :] * DX + d[:, None] if TRANSPOSED else d[:, None] * DO + e[None, :]
    state = S + ((b.to(tl.int64) * N + piece) * H + h) * (DX * DO)
    state = tl.load(state + at, (d < DX)[:, None] & (e < DO)[None, :], other=0.0) * scale
    state = state.to(x.dtype.element_ty)
    x_ = head(x, b, start, h, T, HX, H, DX)
    o_ = head(o, b, start, h, T, H, H, DO)
    left = end - start
    for c in range(0, left, C):
        y = tile(x_ + c * (HX * DX), t, left - c, d, HX * DX, DX)
        put(o_ + c * (H * DO), tl.dot(y, state, input_precision=PREC), t, left - c, e, H * DO, DO)


@triton.jit(do_not_specialize=SIZES)
def quotient_kernel(
    x, y, S, o, table, T, N, LENGTH, scale, eps, H: tl.constexpr, HX: tl.constexpr, DX: tl.constexpr, DO: tl.constexpr,
    BX: tl.constexpr, BO: tl.constexpr, C: tl.constexpr, OWN: tl.constexpr, HALVES: tl.constexpr, PREC: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """As `read_kernel`, S [B, N, H, DX, DO + 1]: the rest is divided by the last column times y (not OWN: x)."""
    NO: tl.constexpr = (DO + BO - 1) // BO
    s = tl.program_id(0) // NO
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    start, end, piece, _, _, _ = span(table, s, T, LENGTH, C, VARLEN)
    if end <= start:
        return
    d = tl.arange(0, BX)
    e = tl.program_id(0) % NO * BO + tl.arange(0, BO)
    t = tl.arange(0, C)
    state = S + ((b.to(tl.int64) * N + piece) * H + h) * (DX * (DO + 1))
    keys = tl.load(state + d * (DO + 1) + DO, d < DX, other=0.0) * scale
    at = d[:, None] * (DO + 1) + e[None, :]
    whole = tl.load(state + at, (d < DX)[:, None] & (e < DO)[None, :], other=0.0) * scale
    upper = whole.to(x.dtype.element_ty)
    lower = (whole - upper.to(tl.float32)).to(x.dtype.element_ty)
    x_ = head(x, b, start, h, T, HX, H, DX)
    y_ = head(y, b, start, h, T, HX, H, DX)
    o_ = head(o, b, start, h, T, H, H, DO)
    left = end - start
    for c in range(0, left, C):
        q = tile(x_ + c * (HX * DX), t, left - c, d, HX * DX, DX)
        if HALVES:
            above = tl.dot(q, upper, tl.dot(q, lower))
        else:
            above = tl.dot(q.to(tl.float32), whole, input_precision=PREC)
        if OWN:
            q = tile(y_ + c * (HX * DX), t, left - c, d, HX * DX, DX)
        below = tl.sum(q.to(tl.float32) * keys[None, :], 1) + eps
        put(o_ + c * (H * DO), above / below[:, None], t, left - c, e, H * DO, DO)


def total(k: Tensor, v: Tensor, cu: Tensor | None, scale: float, S: Tensor | None = None) -> Tensor:
    """``scale · Σ k vᵀ + S`` of each piece ``[B, N, H, K, V]``: the adjoint of a recurrence that forgets nothing."""
    return recurrence(RULE, Inputs(k, k, v), cu, scale).adjoint(Backward(None, v), S).entering


def unsupported(*tensors: Tensor | None) -> str:
    """Why these kernels cannot take tokens [B, T, H, D], states [B, N, H, K, V] and offsets, or an empty string."""
    for x in tensors:
        if x is None or x.dim() == 1:
            continue
        if x.dtype != torch.float32 and (x.dim() == 5 or x.dtype not in (torch.bfloat16, torch.float16)):
            return f"dtype {x.dtype}"
        if x.shape[-1] > 256:
            return f"a head size {x.shape[-1]}"
        if not (0 < x.shape[0] * x.shape[2] <= 65535 and x.shape[1] and x.shape[-1]):
            return f"sizes {list(x.shape)}"
    return ""


def read(x: Tensor, S: Tensor, cu: Tensor | None, scale: float, transposed: bool) -> Tensor:
    """``o [B, T, H, DO]`` in x's dtype of ``x [B, T, Hx, DX]`` and S ``[B, N, H, DX, DO]``, or the other way round."""
    x, S = aligned(x), aligned(S)
    (B, T, HX, DX), N, H = x.shape, S.shape[1], S.shape[2]
    DO = S.shape[3 if transposed else 4]
    cu = None if cu is None else aligned(cu.to(torch.int32))
    fp32 = x.dtype == torch.float32
    chunk = CHUNK // 2 if fp32 else CHUNK
    runs = Runs.of(T, CHUNKS * chunk, chunk, cu)
    block = min(COLUMNS // 2 if fp32 or DX > 128 else COLUMNS, width(DO))
    o = torch.empty(B, T, H, DO, dtype=x.dtype, device=x.device)
    launch(
        read_kernel, (cdiv(DO, block) * runs.count, B * H), x, S, o, runs.table, T, N, runs.length, scale, H=H, HX=HX,
        DX=DX, DO=DO, BX=width(DX), BO=block, C=chunk, TRANSPOSED=transposed, PREC="tf32x3" if fp32 else "tf32",
        VARLEN=cu is not None, num_warps=4, num_stages=1 if fp32 else 3,
    )  # fmt: skip
    return o


def quotient(x: Tensor, own: Tensor | None, S: Tensor, cu: Tensor | None, scale: float, eps: float) -> Tensor:
    """``o [B, T, H, V]`` in x's dtype of ``x [B, T, Hx, K]``, its `own` denominator's like it and S ``[B, N, H, K,
    V+1]``."""
    x, S = aligned(x), aligned(S)
    own = None if own is None else aligned(own)
    (B, T, HX, DX), N, H, DO = x.shape, S.shape[1], S.shape[2], S.shape[4] - 1
    cu = None if cu is None else aligned(cu.to(torch.int32))
    halves = x.dtype == torch.bfloat16
    chunk = CHUNK if halves else CHUNK // 2
    runs = Runs.of(T, CHUNKS * chunk, chunk, cu)
    block = min(COLUMNS // 2 if not halves or DX > 64 else COLUMNS, width(DO))
    o = torch.empty(B, T, H, DO, dtype=x.dtype, device=x.device)
    launch(
        quotient_kernel, (cdiv(DO, block) * runs.count, B * H), *filled(x, own, S, o), runs.table, T, N, runs.length,
        scale, eps, H=H, HX=HX, DX=DX, DO=DO, BX=width(DX), BO=block, C=chunk, OWN=own is not None, HALVES=halves,
        PREC="tf32x3", VARLEN=cu is not None, num_warps=4, num_stages=2 if halves else 1,
    )  # fmt: skip
    return o
