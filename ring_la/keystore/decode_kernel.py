"""One token of each sequence over keys where they lie: a Triton kernel that reads each key once, its launcher.

A sequence's keys are cut into parts, for each of which a program of every key head makes

    o_s = Σ_j exp(s_j − lse_s) v_j,     lse_s = log Σ_j exp s_j          of its queries, j over the part

and a second launch merges a sequence's parts. (Flash-Decoding, Dao, Haziza, Massa and Sizov 2023.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels import gpu
from ..kernels.runtime.launch import launch
from .columns import Columns

WAVES = 2
"""Programs a multiprocessor that sequences are cut into."""
LEAST = 256
"""Keys of the shortest part that is worth a program."""
MERGED = 64
"""Channels of a program that merges parts."""
WIDE = 256
"""Channels of a key from which tiles are others."""


@triton.jit(do_not_specialize=("splits", "heads", "group"))
def _part(
    Q, K, V, Q2, K2, BEGIN, END, O, L, scale, cap, splits, heads, group, width, width2, value,
    q_n, q_h, q2_n, q2_h, k_n, k_h, k_t, v_n, v_h, v_t, k2_n, k2_h, k2_t,
    BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    SAME: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O ``[N, splits, H, V]`` and L ``[N, splits, H]`` of a part of sequence n, for BG queries of a key head."""
    n, s = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    h, g = tl.program_id(1).to(tl.int64), tl.program_id(2) * BG + tl.arange(0, BG)
    begin, end = tl.load(BEGIN + n), tl.load(END + n)
    size = tl.cdiv(tl.cdiv(end - begin, splits), BN) * BN
    first = begin + s * size
    last = tl.minimum(first + size, end)
    of, d, r, c = h * group + g, tl.arange(0, BK), tl.arange(0, BR), tl.arange(0, BV)
    mine = g < group
    q = tl.load(Q + n * q_n + of[:, None] * q_h + d[None, :], mask=mine[:, None] & (d < width)[None, :], other=0.0)
    if BR > 1:
        inside = mine[:, None] & (r < width2)[None, :]
        q2 = tl.load(Q2 + n * q2_n + of[:, None] * q2_h + r[None, :], mask=inside, other=0.0)
    top = tl.full((BG,), -float("inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    o = tl.zeros((BG, BV), tl.float32)
    for at in range(first, last, BN):
        j = at + tl.arange(0, BN)
        there = (j < last)[:, None]
        k = tl.load(K + n * k_n + h * k_h + j[:, None] * k_t + d[None, :], mask=there & (d < width)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BR > 1:
            k2 = K2 + n * k2_n + h * k2_h + j[:, None] * k2_t + r[None, :]
            k2 = tl.load(k2, mask=there & (r < width2)[None, :], other=0.0)
            x += tl.dot(q2, tl.trans(k2), input_precision=PRECISION)
        x *= scale
        if CAPPED:
            x = cap * (1 - 2 / (1 + tl.exp(2 * x / cap)))
        x = tl.where((j < last)[None, :], x, -float("inf"))
        new = tl.maximum(top, tl.max(x, 1))
        p = tl.exp(x - new[:, None])
        keep = tl.exp(top - new)
        total = total * keep + tl.sum(p, 1)
        top = new
        if SAME:
            v = k
        else:
            v = V + n * v_n + h * v_h + j[:, None] * v_t + c[None, :]
            v = tl.load(v, mask=there & (c < value)[None, :], other=0.0)
        if PRECISION == "ieee":
            o = o * keep[:, None] + tl.dot(p, v, input_precision=PRECISION)
        else:  # two numbers of 16 bits for a weight
            high = p.to(v.dtype)
            low = (p - high.to(tl.float32)).to(v.dtype)
            o = tl.dot(low, v, tl.dot(high, v, o * keep[:, None]))
    some = total > 0
    o = o / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    row = (n * splits + s) * (heads * group) + of
    tl.store(L + row, lse, mask=mine)
    tl.store(O + row[:, None] * value + c[None, :], o, mask=mine[:, None] & (c < value)[None, :])


@triton.jit(do_not_specialize=("splits", "heads"))
def _merge(O, L, OUT, LSE, splits, heads, value, BS: tl.constexpr, BV: tl.constexpr):
    """OUT ``[N, H, V]`` and LSE ``[N, H]`` of parts O ``[N, splits, H, V]`` and L ``[N, splits, H]``."""
    n, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    s, c = tl.arange(0, BS), tl.program_id(1) * BV + tl.arange(0, BV)
    row = (n * splits + s) * heads + h
    lse = tl.load(L + row, mask=s < splits, other=-float("inf"))
    top = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    inside = (s < splits)[:, None] & (c < value)[None, :]
    o = tl.load(O + row[:, None] * value + c[None, :], mask=inside, other=0.0)
    safe = tl.where(total > 0, total, 1.0)
    tl.store(OUT + (n * heads + h) * value + c, tl.sum(o * weight[:, None], 0) / safe, mask=c < value)
    if tl.program_id(1) == 0:
        tl.store(LSE + n * heads + h, tl.where(total > 0, top + tl.log(safe), -float("inf")))


def decode_columns(q: Tensor, keys: Columns, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """What ``q [N, H, K]``, in the dtype of the keys, reads: o ``[N, H, V]`` and lse ``[N, H]``, fp32."""
    k, v, begin, end, q2, k2 = keys
    N, heads, columns, width = k.shape
    H, value = q.shape[1], width if v is None else v.shape[3]
    group, wide = H // heads, k.dtype == torch.float32
    BG, BN, warps, stages = _tile(group, width)
    programs = N * heads * -(-group // BG)
    splits = max(1, min(-(-gpu.multiprocessors(k.device) * WAVES // programs), -(-columns // LEAST)))
    parts = torch.empty(N, splits, H, value, dtype=torch.float32, device=k.device)
    lses = torch.empty(N, splits, H, dtype=torch.float32, device=k.device)
    out, lse = (torch.empty(N, H, *rest, dtype=torch.float32, device=k.device) for rest in ((value,), ()))
    v_, q2_, k2_ = k if v is None else v, q if q2 is None else q2, k if k2 is None else k2
    R = 1 if k2 is None else triton.next_power_of_2(k2.shape[3])
    launch(
        _part, (N * splits, heads, -(-group // BG)),
        q, k, v_, q2_, k2_, begin, end, parts, lses, scale, softcap, splits, heads, group, width, k2_.shape[3], value,
        *q.stride()[:2], *q2_.stride()[:2], *k.stride()[:3], *v_.stride()[:3], *k2_.stride()[:3],
        BG=BG, BN=BN, BK=max(16, triton.next_power_of_2(width)), BR=R if R == 1 else max(16, R),
        BV=max(16, triton.next_power_of_2(value)), SAME=v is None, CAPPED=softcap > 0,
        PRECISION="ieee" if wide else "tf32", num_warps=warps, num_stages=stages, tensors="any",
    )  # fmt: skip
    launch(
        _merge, (N * H, -(-value // MERGED)), parts, lses, out, lse, splits, H, value,
        BS=triton.next_power_of_2(splits), BV=MERGED, num_warps=4, num_stages=1, tensors="any",
    )  # fmt: skip
    return out, lse


def _tile(group: int, width: int) -> tuple[int, int, int, int]:
    """Queries of a program, keys of a tile, warps and stages: the fastest of those tried on an H200."""
    if group > 16:
        return 32, 64, 8 if width > WIDE else 4, 2
    return 16, 32 if width > WIDE else 64, 4, 3
