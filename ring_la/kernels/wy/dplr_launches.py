"""Launches of DPLR's kernels in CUDA C++ on Hopper (`dplr_forward.cu`, `dplr_backward.cu`): one each way, for
gates whose lower bound is known, such as RWKV-7's.

Chunks have 32 tokens. A span that forgets what the four to eight chunks before it (backward: behind it) hold of a state
starts there early, from zero; another one that is not a piece's outer one waits for the span before it.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.wy.span_call import CHUNK, HEAD, SpanCall
from ring_la.kernels.wy.span_launches import KeptChunks, SpanLaunches, States, heads_at_a_time, launch

LEAST = -29.5 * math.log(2) / CHUNK
"""The lowest bound of a gate with which a chunk's factors fit."""
SPANS = 15
"""Of a row, at most."""
PAIRS = 4 * CHUNK * CHUNK + 8
"""Numbers that a chunk keeps of its pairs, and what tiles were multiplied by."""
ALONE = 0, 1
"""Programs do not take spans that wait first, and each of those hands its state on by itself."""
ARGUMENTS = "17Q11if"
SHARED = 3 * (58368 + 32 + 16) + 2 * (2304 + 64) + 64 + 16 + 16 + 1024
BACKWARD_SHARED = 2 * (81920 + 512 + 48 + 64 + 32) + 2 * 32768 + 64 + 16 + 16 + 16 + 1024


@functools.cache
def forward_kernel(keep: bool) -> CudaKernel:
    file, defines = Path(__file__).parent / "dplr_forward.cu", (f"KEEP={int(keep)}",)
    return CudaKernel(file, "dplr_forward", ARGUMENTS, 384, SHARED + keep * 32768, defines)


@functools.cache
def backward_kernel() -> CudaKernel:
    file = Path(__file__).parent / "dplr_backward.cu"
    return CudaKernel(file, "dplr_backward", ARGUMENTS + "7Q", 384, BACKWARD_SHARED)


def cut(tokens: int, heads: int, pieces: int, programs: int, equal: bool) -> tuple[int, int]:
    """Tokens a span and of a row's outer one, as `gdn_launches.cut`: as many spans as run at once, or none."""
    each, count = cdiv(cdiv(tokens, pieces), CHUNK), min(programs // (pieces * heads), SPANS)
    if count < 3 or (not equal and pieces > 3):
        return (CHUNK * (each if equal else cdiv(tokens, CHUNK)),) * 2
    length = CHUNK * cdiv(each, count + 1 if equal else count)
    return length, 2 * length if equal else length


def group(chunks: int, heads: int) -> int:
    """Heads at a time whose chunks are held."""
    return heads_at_a_time(chunks, heads, HEAD * HEAD + CHUNK * HEAD + PAIRS)


def _room(call: SpanCall, heads: int) -> KeptChunks:
    """For the states before chunks, Y, and P of k and b, L and M: fp16, as the kernels lay it out."""
    shape, bf16 = (call.chunks, heads), torch.bfloat16
    return KeptChunks(
        call.new(*shape, HEAD, HEAD, dtype=bf16),
        call.new(*shape, CHUNK, HEAD, dtype=bf16),
        call.new(*shape, PAIRS, dtype=bf16),
    )


def _run(call: SpanCall, heads: range, o: Tensor | None, states: States, kept: KeptChunks | None) -> None:
    kernel, x = forward_kernel(kept is not None), call.inputs
    launch(call, kernel, heads, (x.a, x.b, x.g), o, states, (None, *(kept or (None,) * 3)), (*ALONE, call.outer))


def _back(call: SpanCall, heads: range, states: States, kept: KeptChunks, do: Tensor, to: Inputs) -> None:
    x, further = call.inputs, (do, *to.qkv, to.a, to.b, to.g)
    own = (None, *kept), (*ALONE, -call.outer)
    launch(call, backward_kernel(), heads, (x.a, x.b, x.g), None, states, *own, further)


def _results(call: SpanCall) -> Inputs:
    shape = call.inputs.v.shape
    dq, dk, dv, da, db, dg = (call.new(*shape, dtype=torch.bfloat16) for _ in range(6))
    return Inputs(dq, dk, dv, dg, None, da, db)


LAUNCHES = SpanLaunches(
    lambda x, cu, scale: SpanCall.of(x, cu, scale, cut),
    _room,
    lambda chunks, heads: group(chunks, heads),
    _run,
    _back,
    _results,
)
keeps, forward, gradients = LAUNCHES.keeps, LAUNCHES.forward, LAUNCHES.gradients
