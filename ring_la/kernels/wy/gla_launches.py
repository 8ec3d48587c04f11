"""Launches of GLA's kernels in CUDA C++ on Hopper (`gla_forward.cu`, `gla_backward.cu`): one each way, for any
gate that is at most 0.

Chunks have 32 tokens, and spans are those of `gdn_launches`: one may begin up to 24 chunks early, or waits for the one
before it. Where states meet those of other ranks a launch finds spans' maps, and another goes over all spans at once
(`across`).
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
from ring_la.kernels.wy.passing import Passing
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
def forward_kernel(keep: bool, gate: str, maps: bool = False, given: bool = False) -> CudaKernel:
    """`keep`: it leaves what a backward wants of chunks; `maps`: it finds spans' maps alone; `given`: it is given what
    enters each span."""
    slots, size = SLOTS[gate == "GATE_BF16=1"]
    shared = (slots - keep) * (size + 16 + 32 + 512) + keep * 32768 + 4 * 512 + 32 + 32 + 1024
    file = Path(__file__).parent / "gla_forward.cu"
    defines = (f"KEEP={int(keep)}", gate, f"MAPS={int(maps)}", f"GIVEN={int(given)}")
    return CudaKernel(file, "gla_forward", ARGUMENTS + "Q" * maps, 384, shared, defines)


@functools.cache
def backward_kernel(gate: str, maps: bool = False, given: bool = False) -> CudaKernel:
    file, arguments = Path(__file__).parent / "gla_backward.cu", ARGUMENTS + "Q" * maps + "5Q"
    defines = (gate, f"MAPS={int(maps)}", f"GIVEN={int(given)}")
    return CudaKernel(file, "gla_backward", arguments, 384, BACKWARD_SHARED, defines)


def group(chunks: int, heads: int) -> int:
    """Heads at a time whose chunks are held."""
    return heads_at_a_time(chunks, heads, HEAD * HEAD + PAIRS)


def room(call: SpanCall, heads: int) -> KeptPairs:
    """For what a backward wants of chunks."""
    shape, bf16 = (call.chunks, heads), torch.bfloat16
    return KeptPairs(call.new(*shape, HEAD, HEAD, dtype=bf16), call.new(*shape, PAIRS, dtype=bf16))


def run(
    call: SpanCall, heads: range, o: Tensor | None, states: States, kept: KeptPairs | None,
    passing: Passing | None = None,
) -> None:  # fmt: skip
    """The forward over some heads; of a `passing` with maps these alone."""
    how, further = _asked(passing)
    kernel = forward_kernel(kept is not None, _define(call), **how)
    _launch(call, kernel, heads, o, states, kept or (None, None), further, passing)


def back(
    call: SpanCall, heads: range, states: States, kept: KeptPairs, do: Tensor, to: Inputs | None,
    passing: Passing | None = None,
) -> None:  # fmt: skip
    """The backward over some heads, likewise."""
    how, further = _asked(passing)
    results = (None,) * 4 if to is None else (*to.qkv, to.g)
    kernel = backward_kernel(_define(call), **how)
    _launch(call, kernel, heads, None, states, kept, (*further, do, *results), passing)


def _asked(passing: Passing | None) -> tuple[dict[str, bool], tuple[Tensor | None, ...]]:
    """What a kernel is compiled for, and takes further."""
    if passing is None:
        return {}, ()
    return dict(maps=passing.maps, given=passing.given), (passing.parts,) * passing.maps


def _launch(
    call: SpanCall, kernel: CudaKernel, heads: range, o: Tensor | None, states: States,
    kept: KeptPairs | tuple[None, None], further: tuple[Tensor | None, ...], passing: Passing | None,
) -> None:  # fmt: skip
    pick = passing is None and gdn_launches.picks(call.count * len(heads), call.inputs.v.device)
    launch(call, kernel, heads, (call.inputs.g,), o, states, kept, (pick,), further, passing)


def results(call: SpanCall) -> Inputs:
    """Room for the inputs' gradients; q's and k's have the heads of v."""
    v, g = call.inputs.v, call.inputs.g
    dq, dk, dv = (call.new(*v.shape, dtype=torch.bfloat16) for _ in range(3))
    return Inputs(dq, dk, dv, None if g is None else torch.empty_like(g))


LAUNCHES = SpanLaunches(
    lambda x, cu, scale: SpanCall.of(x, cu, scale, evenly),
    room,
    lambda chunks, heads: group(chunks, heads),
    run,
    back,
    results,
)
keeps, forward, gradients = LAUNCHES.keeps, LAUNCHES.forward, LAUNCHES.gradients
