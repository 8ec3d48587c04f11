"""Launches of GLA's kernels in CUDA C++ on Hopper (`gla_forward.cu`, `gla_backward.cu`): one each way, for any
gate that is at most 0.

Chunks have 32 tokens, and spans are those of `gdn_launches`: one may begin up to 24 chunks early, or waits for the one
before it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.wy import gdn_launches
from ring_la.kernels.wy.span_call import CHUNK, HEAD, SpanCall
from ring_la.kernels.wy.span_launches import SpanLaunches, States, heads_at_a_time, launch

ARGUMENTS = "13Q9if"
PAIRS = CHUNK * CHUNK + 8
"""Numbers of 16 bits of a chunk's pairs, and behind them what its state is multiplied by."""
SLOTS = {True: (6, 35840), False: (5, 44032)}
"""By whether gates are bf16: chunks under way in a forward that keeps nothing, and the bytes of one."""
BACKWARD_SHARED = 3 * (54272 + 512 + 16 + 64) + 2 * 32768 + 16 + 32 + 32 + 1024


class KeptPairs(NamedTuple):
    """What a backward wants of chunks: the states before them and their pairs, in fp16 or bf16 (their bits)."""

    states: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, saved: tuple[Tensor | None, ...]) -> KeptPairs | None:
        """What a forward in one launch left, if it did; one in chunks leaves more."""
        states, pairs = saved if len(saved) == 2 else (None, None)
        return None if states is None or pairs is None else cls(states, pairs)


def evenly(tokens: int, heads: int, pieces: int, programs: int, equal: bool) -> tuple[int, int]:
    """As `gdn_launches.cut`: spans that wait go over their tokens once before they hand a state on, too."""
    return (gdn_launches.span(tokens, heads, pieces, programs, equal),) * 2


def _define(call: SpanCall) -> str:
    g = call.inputs.g
    return f"GATE_BF16={int(g is not None and g.dtype == torch.bfloat16)}"


@functools.cache
def forward_kernel(keep: bool, gate: str) -> CudaKernel:
    slots, size = SLOTS[gate == "GATE_BF16=1"]
    shared = (slots - keep) * (size + 16 + 32 + 512) + keep * 32768 + 4 * 512 + 32 + 32 + 1024
    file = Path(__file__).parent / "gla_forward.cu"
    return CudaKernel(file, "gla_forward", ARGUMENTS, 384, shared, (f"KEEP={int(keep)}", gate))


@functools.cache
def backward_kernel(gate: str) -> CudaKernel:
    file = Path(__file__).parent / "gla_backward.cu"
    return CudaKernel(file, "gla_backward", ARGUMENTS + "5Q", 384, BACKWARD_SHARED, (gate,))


def group(chunks: int, heads: int) -> int:
    """Heads at a time whose chunks are held."""
    return heads_at_a_time(chunks, heads, HEAD * HEAD + PAIRS)


def _room(call: SpanCall, heads: int) -> KeptPairs:
    shape, bf16 = (call.chunks, heads), torch.bfloat16
    return KeptPairs(call.new(*shape, HEAD, HEAD, dtype=bf16), call.new(*shape, PAIRS, dtype=bf16))


def _picks(call: SpanCall, heads: range) -> bool:
    return gdn_launches.picks(call.count * len(heads), call.inputs.v.device)


def _run(call: SpanCall, heads: range, o: Tensor | None, states: States, kept: KeptPairs | None) -> None:
    kernel, picks = forward_kernel(kept is not None, _define(call)), _picks(call, heads)
    launch(call, kernel, heads, (call.inputs.g,), o, states, kept or (None, None), (picks,))


def _back(call: SpanCall, heads: range, states: States, kept: KeptPairs, do: Tensor, to: Inputs) -> None:
    kernel, further = backward_kernel(_define(call)), (do, *to.qkv, to.g)
    launch(call, kernel, heads, (call.inputs.g,), None, states, kept, (_picks(call, heads),), further)


def _results(call: SpanCall) -> Inputs:
    v, g = call.inputs.v, call.inputs.g
    dq, dk, dv = (call.new(*v.shape, dtype=torch.bfloat16) for _ in range(3))
    return Inputs(dq, dk, dv, None if g is None else torch.empty_like(g))


LAUNCHES = SpanLaunches(
    lambda x, cu, scale: SpanCall.of(x, cu, scale, evenly),
    _room,
    lambda chunks, heads: group(chunks, heads),
    _run,
    _back,
    _results,
)
keeps, forward, gradients = LAUNCHES.keeps, LAUNCHES.forward, LAUNCHES.gradients
