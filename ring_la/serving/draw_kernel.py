"""The token that each row draws, in one pass over its logits: a Triton kernel that makes the random numbers of `dice`
where they are used, its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.runtime.launch import launch
from ..kernels.sizes import cdiv
from . import dice

TOKENS, WARPS = 1024, 4
"""Of a program."""
GAMMA = tl.constexpr(dice.GAMMA)
FIRST = tl.constexpr(dice.FIRST % 2**64)
SECOND = tl.constexpr(dice.SECOND % 2**64)
MOST = tl.constexpr(dice.MOST)


@triton.jit(do_not_specialize=("count", "parts"))
def _draw(Y, TOP, STREAM, OUT, SCORE, TOKEN, count, parts, CUT: tl.constexpr, BN: tl.constexpr):
    """Of BN tokens of row n the one with the least SCORE ``[N, parts]``, −weight / E, and the score."""
    part, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = part * BN + tl.arange(0, BN)
    there = i < count
    y = tl.load(Y + n * count + i, there, other=-float("inf"))
    weight = tl.exp(y - tl.load(TOP + n))
    if CUT:
        weight = tl.where(tl.load(OUT + n * count + i, there, other=1) != 0, 0.0, weight)
    x = tl.load(STREAM + n).to(tl.uint64, bitcast=True) + (i + 1).to(tl.uint64) * GAMMA
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    x = (x ^ (x >> 31)) & MOST
    u = x.to(tl.float32) * 1.0842021724855044e-19  # 2⁻⁶³
    u = tl.minimum(tl.maximum(u, 5.421010862427522e-20), 0.99999994)
    rest = 1.0 - u  # of which the logarithm is as exact as its rounding, which the quotient takes out of small ones
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    score, at = tl.min(tl.where(there, -weight / exponential, 0.0), 0, return_indices=True)
    tl.store(SCORE + n * parts + part, score)
    tl.store(TOKEN + n * parts + part, (part * BN + at).to(tl.int64))


def draw(y: Tensor, top: Tensor, streams: Tensor, out: Tensor | None) -> Tensor:
    """The tokens drawn ``[N]`` of fp32 ``y [N, V]``, logits by temperatures, the largest of which are ``top [N, 1]``,
    with int64 ``streams [N, 1]``, but for those in bool ``out [N, V]``; −1 where none can be."""
    rows, count = y.shape
    y, out = y.contiguous(), None if out is None else out.contiguous()  # logits of shards may lie otherwise
    parts = cdiv(count, TOKENS)
    score, token = y.new_empty(rows, parts), streams.new_empty(rows, parts)
    launch(
        _draw, (parts, rows), y, top, streams, y if out is None else out, score, token, count, parts,
        CUT=out is not None, BN=TOKENS, num_warps=WARPS, tensors="any",
    )  # fmt: skip
    least = score.min(-1, keepdim=True)
    return torch.where(least.values < 0, token.gather(1, least.indices), -1)[:, 0]
