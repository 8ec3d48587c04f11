"""Launches of DPLR's kernels in CUDA C++ on Hopper (`dplr_forward.cu`, `dplr_backward.cu`): one each way, for
gates whose lower bound is known, such as RWKV-7's.

Chunks have 32 tokens. Every span but a piece's outer one waits for the one before it (backward: behind it).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.spans.table import cdiv
from ring_la.kernels.wy.gdn_launches import GDNCall, KeptChunks
from ring_la.kernels.wy.kda_launches import HEAD
from ring_la.kernels.wy.span_launches import CHUNK, SpanLaunches, States, heads_at_a_time

LEAST = -29.5 * math.log(2) / CHUNK
"""The lowest bound of a gate with which a chunk's factors fit."""
SPANS = 15
"""Of a row, at most."""
PAIRS = 4 * CHUNK * CHUNK + 8
"""Numbers that a chunk keeps of its pairs, and what tiles were multiplied by."""
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


def _room(call: GDNCall, heads: int) -> KeptChunks:
    """For the states before chunks, Y, and P of k and b, L and M: fp16, as the kernels lay it out."""
    shape, bf16 = (call.chunks, heads), torch.bfloat16
    return KeptChunks(
        call.new(*shape, HEAD, HEAD, dtype=bf16),
        call.new(*shape, CHUNK, HEAD, dtype=bf16),
        call.new(*shape, PAIRS, dtype=bf16),
    )


def _launch(
    call: GDNCall, kernel: CudaKernel, heads: range, o: Tensor | None, states: States,
    kept: KeptChunks | tuple[None, None, None], further: tuple[Tensor, ...] = (),
) -> None:  # fmt: skip
    x, device = call.inputs, call.inputs.v.device
    (_, T, H, _), programs = x.v.shape, call.count * len(heads)
    table = None if call.runs is None else call.runs.table
    flags = torch.zeros(2 * call.count * H + 3 + programs, dtype=torch.int32, device=device)
    kernel(
        programs, *x.qkv, x.a, x.b, x.g, o, *states, table, call.cu, flags,
        call.new(call.count, H, HEAD, HEAD), None, *kept, T, H, x.q.shape[2], call.count, call.length, call.pieces,
        heads.start, len(heads), 0, 1, -call.outer if further else call.outer, call.scale, *further,
    )  # fmt: skip


def _run(call: GDNCall, heads: range, o: Tensor | None, states: States, kept: KeptChunks | None) -> None:
    _launch(call, forward_kernel(kept is not None), heads, o, states, kept or (None,) * 3)


def _back(call: GDNCall, heads: range, states: States, kept: KeptChunks, do: Tensor, to: Inputs) -> None:
    _launch(call, backward_kernel(), heads, None, states, kept, (do, *to.qkv, to.a, to.b, to.g))


def _results(call: GDNCall) -> Inputs:
    shape = call.inputs.v.shape
    dq, dk, dv, da, db, dg = (call.new(*shape, dtype=torch.bfloat16) for _ in range(6))
    return Inputs(dq, dk, dv, dg, None, da, db)


LAUNCHES = SpanLaunches(
    lambda x, cu, scale: GDNCall.of(x, cu, scale, cut),
    _room,
    lambda chunks, heads: group(chunks, heads),
    _run,
    _back,
    _results,
)
keeps, forward, gradients = LAUNCHES.keeps, LAUNCHES.forward, LAUNCHES.gradients
