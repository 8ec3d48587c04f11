"""The lightning indexer's loss and its gradients in one kernel, a program a query, which goes through its chosen keys
twice: first for the denominators of attention's and of the index's softmax, then for the loss and the gradients.
Where attention's are given, the first time reads index keys alone: of latents a third of all bytes less.

Nothing that is gathered is written down. Gradients of index keys are summed by atomics, in an order that varies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels import sizes
from ..kernels.runtime.launch import launch
from ..softmax.merging.parts import dense
from .chosen import Rows

WIDEST = 512
"""Columns of attention's keys in one piece; of latents the rotary part is another."""
TILE: dict[str, Any] = dict(BN=32, num_warps=4, num_stages=3)
"""Of up to 16 heads: with the keys of the next tile under way a multiprocessor has room for two programs."""
MANY: dict[str, Any] = dict(BN=32, num_warps=8, num_stages=1)
"""Of more."""
NOTHING = tl.constexpr(-1e30)
"""A hidden score: finite, so that differences of two are."""


@triton.jit
def index_tile(K, CHOSEN, slots, S, start, token, k_t, width, BD: tl.constexpr):
    """Of some slots: rows, which of them count, index keys."""
    at = tl.load(CHOSEN + slots, mask=slots < S, other=-1).to(tl.int64)
    seen, d = (slots < S) & (at >= start) & (at <= token), tl.arange(0, BD)
    k = tl.load(K + at[:, None] * k_t + d[None, :], mask=seen[:, None] & (d < width)[None, :], other=0.0)
    return at, seen, k


@triton.jit
def tile(K, AK, CHOSEN, slots, S, start, token, k_t, ak_t, width,
         KW: tl.constexpr, RW: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The same, with attention's keys and their last columns."""
    at, seen, k = index_tile(  # pyright: ignore[reportGeneralTypeIssues]
        K, CHOSEN, slots, S, start, token, k_t, width, BD
    )
    c, r = tl.arange(0, BK), tl.arange(0, BR)
    a = tl.load(AK + at[:, None] * ak_t + c[None, :], mask=seen[:, None] & (c < KW)[None, :], other=0.0)
    rest = tl.load(AK + at[:, None] * ak_t + KW + r[None, :], mask=seen[:, None] & (r < RW)[None, :], other=0.0)
    return at, seen, k, a, rest


@triton.jit(do_not_specialize=("S", "T"))
def loss_and_gradients(
    Q, K, W, AQ, AK, LSE, CHOSEN, TOKENS, STARTS, LOSS, DQ, DK, DW, scale, S, T, heads, width, of_attention,
    q_b, q_t, q_h, k_b, k_t, w_b, w_t, w_h, aq_b, aq_t, aq_h, ak_b, ak_t, c_b, c_t, dk_b,
    KW: tl.constexpr, RW: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """LSE: attention's, fp32 ``[B, H, T]``, where it is GIVEN. LOSS and DW fp32 ``[B, T]`` and ``[B, T, Hi]``, DQ fp32
    ``[B, T, Hi, D]``, DK fp32 ``[B, Tk, D]``."""
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, start = tl.load(TOKENS + t), tl.load(STARTS + t)
    i, d, n = tl.arange(0, BI), tl.arange(0, BD), tl.arange(0, BN)
    h, c, r = tl.arange(0, BH), tl.arange(0, BK), tl.arange(0, BR)
    long = t.to(tl.int64)
    q = Q + b * q_b + long * q_t + i[:, None] * q_h + d[None, :]
    q = tl.load(q, mask=(i < heads)[:, None] & (d < width)[None, :], other=0.0)
    w = tl.load(W + b * w_b + long * w_t + i * w_h, mask=i < heads, other=0.0).to(tl.float32)
    row, there = AQ + b * aq_b + long * aq_t + h[:, None] * aq_h, h < of_attention
    aq = tl.load(row + c[None, :], mask=there[:, None] & (c < KW)[None, :], other=0.0)
    ar = tl.load(row + KW + r[None, :], mask=there[:, None] & (r < RW)[None, :], other=0.0)
    K += b * k_b
    AK += b * ak_b
    CHOSEN += b * c_b + long * c_t
    top, total = tl.full((BH,), NOTHING, tl.float32), tl.zeros((BH,), tl.float32)
    itop, itotal = tl.full((), NOTHING, tl.float32), tl.zeros((), tl.float32)
    for first in range(0, S, BN):
        if GIVEN:
            at, seen, k = index_tile(K, CHOSEN, first + n, S, start, token, k_t, width, BD)
        else:
            at, seen, k, a, rest = tile(K, AK, CHOSEN, first + n, S, start, token, k_t, ak_t, width, KW, RW, BK, BR, BD)
            s = (tl.dot(aq, tl.trans(a)) + tl.dot(ar, tl.trans(rest))) * scale
            s = tl.where(seen[None, :], s, NOTHING)
            new = tl.maximum(top, tl.max(s, 1))
            total = total * tl.exp(top - new) + tl.sum(tl.where(seen[None, :], tl.exp(s - new[:, None]), 0.0), 1)
            top = new
        index = tl.sum(tl.maximum(tl.dot(q, tl.trans(k)), 0.0) * w[:, None], 0)
        index = tl.where(seen, index, NOTHING)
        inew = tl.maximum(itop, tl.max(index, 0))
        itotal = itotal * tl.exp(itop - inew) + tl.sum(tl.where(seen, tl.exp(index - inew), 0.0), 0)
        itop = inew
    ilse = itop + tl.log(tl.maximum(itotal, 1e-30))
    if GIVEN:
        lse = tl.load(LSE + (b * of_attention + h) * T + long, mask=there, other=0.0)
    else:
        lse = top + tl.log(tl.maximum(total, 1e-30))
    loss = tl.zeros((BN,), tl.float32)
    dq, dw = tl.zeros((BI, BD), tl.float32), tl.zeros((BI,), tl.float32)
    for first in range(0, S, BN):
        at, seen, k, a, rest = tile(  # pyright: ignore[reportGeneralTypeIssues]
            K, AK, CHOSEN, first + n, S, start, token, k_t, ak_t, width, KW, RW, BK, BR, BD
        )
        s = (tl.dot(aq, tl.trans(a)) + tl.dot(ar, tl.trans(rest))) * scale
        p = tl.where(there[:, None] & seen[None, :], tl.exp(s - lse[:, None]), 0.0)
        p = tl.sum(p, 0) / of_attention
        raw = tl.dot(q, tl.trans(k))
        log = tl.where(seen, tl.sum(tl.maximum(raw, 0.0) * w[:, None], 0) - ilse, 0.0)
        loss += tl.where(p > 0, p * (tl.log(tl.maximum(p, 1e-37)) - log), 0.0)
        ds = tl.where(seen, tl.exp(log) - p, 0.0)  # all p together are one
        dw += tl.sum(tl.maximum(raw, 0.0) * ds[None, :], 1)
        draw = tl.where(raw > 0, ds[None, :] * w[:, None], 0.0)
        dq += tl.dot(draw, k.to(tl.float32), input_precision="tf32")
        dk = tl.dot(tl.trans(draw), q.to(tl.float32), input_precision="tf32")
        into = DK + b * dk_b + at[:, None] * width + d[None, :]
        tl.atomic_add(into, dk, mask=seen[:, None] & (d < width)[None, :], sem="relaxed")
    place = b * T + long
    tl.store(LOSS + place, tl.sum(loss, 0))
    tl.store(DW + place * heads + i, dw, mask=i < heads)
    into = DQ + (place * heads + i[:, None]) * width + d[None, :]
    tl.store(into, dq, mask=(i < heads)[:, None] & (d < width)[None, :])


def with_gradients(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    chosen: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    scale: float,
    rows: Rows,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L and its gradients for q, k and w. ``chosen [B, T, S]``; `lse` of attention, ``[B, H, T]``."""
    q, k, attention_q, attention_k, chosen = (dense(x) for x in (q, k, attention_q, attention_k, chosen))
    (B, T, heads, D), (H, A), S = q.shape, attention_q.shape[2:], chosen.shape[2]
    loss, dw = q.new_empty(B, T, dtype=torch.float32), q.new_empty(B, T, heads, dtype=torch.float32)
    dq, dk = q.new_empty(q.shape, dtype=torch.float32), k.new_zeros(k.shape, dtype=torch.float32)
    body = A if A <= 256 else min(A, WIDEST)
    ak, given = attention_k[:, :, 0], loss if lse is None else lse.float().contiguous()
    if loss.numel():
        launch(
            loss_and_gradients, (T, B), q, k, w, attention_q, ak, given, chosen, rows.tokens, rows.starts,
            loss, dq, dk, dw, float(scale), S, T, heads, D, H, *_strides(q)[:3], *_strides(k)[:2], *_strides(w),
            *_strides(attention_q)[:3], *_strides(ak)[:2], *_strides(chosen)[:2], _strides(dk)[0],
            KW=body, RW=A - body, BH=sizes.width(H), BK=sizes.width(body), BR=sizes.width(A - body),
            BI=sizes.width(heads), BD=sizes.width(D), GIVEN=lse is not None,
            **(TILE if max(H, heads) <= 16 else MANY), tensors="any",
        )  # fmt: skip
    return loss.sum(), dq.to(q.dtype), dk.to(k.dtype), dw.to(w.dtype)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Of one batch row its stride is 0: of many tokens it takes more than 32 bits, and another kernel."""
    return x.stride() if len(x) > 1 else (0, *x.stride()[1:])
