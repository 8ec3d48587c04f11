"""Launches of GLA's kernels in CUDA C++ on Hopper (`gla_forward.cu`, `gla_backward.cu`): one each way, for any
gate that is at most 0.

Chunks have 32 tokens, and spans are those of `gdn_launches`: one may begin up to 24 chunks early, or waits for the one
before it.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.spans.heads import summed
from ring_la.kernels.spans.table import cdiv
from ring_la.kernels.wy import gdn_launches
from ring_la.kernels.wy.gdn_launches import CHUNK, GDNCall
from ring_la.kernels.wy.kda_launches import HEAD, by_row

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


def _define(call: GDNCall) -> str:
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
    """Heads at a time whose chunks' states are held: groups of about one size."""
    most = max(1, gdn_launches.KEPT // (chunks * 2 * (HEAD * HEAD + PAIRS)))
    return cdiv(heads, math.ceil(heads / most))


def keeps(inputs: Inputs, cu: Tensor | None) -> bool:
    """Whether a forward leaves what a backward wants, or that makes it again."""
    B, T, H = inputs.v.shape[:3]
    return group(B * cdiv(T, CHUNK) if cu is None else T // CHUNK + cu.numel() - 1, H) == H


def _kept(call: GDNCall, heads: int) -> KeptPairs:
    """Room for what a backward wants of chunks."""
    shape, bf16 = (call.chunks, heads), torch.bfloat16
    return KeptPairs(call.new(*shape, HEAD, HEAD, dtype=bf16), call.new(*shape, PAIRS, dtype=bf16))


def _launch(
    call: GDNCall, kernel: CudaKernel, heads: range, o: Tensor | None, states: tuple[Tensor | None, Tensor | None],
    kept: KeptPairs | tuple[None, None], further: tuple[Tensor | None, ...] = (),
) -> None:  # fmt: skip
    """`states`: those it begins with and those it ends with (gradients, backward)."""
    x, device = call.inputs, call.inputs.v.device
    (_, T, H, _), programs = x.v.shape, call.count * len(heads)
    table = None if call.runs is None else call.runs.table
    flags = torch.zeros(2 * call.count * H + 3 + programs, dtype=torch.int32, device=device)
    kernel(
        programs, *x.qkv, x.g, o, *states, table, call.cu, flags,
        call.new(call.count, H, HEAD, HEAD), *kept, T, H, x.q.shape[2], call.count, call.length, call.pieces,
        heads.start, len(heads), gdn_launches.picks(programs, device), call.scale, *further,
    )  # fmt: skip


def forward(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool, keep: bool = False
) -> tuple[Tensor, Tensor | None, KeptPairs | None]:
    """o ``[B, T, H, V]``; if `final` the states that leave the pieces ``[B, N, H, K, V]``, `S0` like those; if `keep`
    what `gradients` take."""
    H, call = inputs.v.shape[2], GDNCall.of(inputs, cu, scale, evenly)
    o, leaving = torch.empty_like(call.inputs.v), call.states() if final else None
    kept = _kept(call, H) if keep else None
    entering = None if S0 is None else aligned(S0)
    _launch(call, forward_kernel(keep, _define(call)), range(H), o, (entering, leaving), kept or (None, None))
    return o, None if leaving is None else by_row(leaving, inputs.v.shape[0]), kept


def gradients(
    inputs: Inputs,
    cu: Tensor | None,
    scale: float,
    S0: Tensor | None,
    do: Tensor,
    dS_end: Tensor | None,
    kept: KeptPairs | None,
) -> tuple[Inputs, Tensor]:
    """Those of the inputs, and of the states that enter. `kept`: what `forward` left of the same tokens; None: it is
    made again, as many heads at a time as `gdn_launches.KEPT` bytes hold."""
    (B, T, H, _), HK = inputs.v.shape, inputs.q.shape[2]
    call = GDNCall.of(inputs, cu, scale, evenly)
    do = aligned(do.to(torch.bfloat16))
    S0, dS_end = (None if x is None else aligned(x.to(torch.float32)) for x in (S0, dS_end))
    dq, dk, dv = (call.new(B, T, H, HEAD, dtype=torch.bfloat16) for _ in range(3))
    dg, dS0 = None if call.inputs.g is None else torch.empty_like(call.inputs.g), call.states()
    each = H if kept is not None else group(call.chunks, H)
    room = _kept(call, each) if kept is None else kept
    for first in range(0, H, each):
        heads = range(first, min(first + each, H))
        if kept is None:
            _launch(call, forward_kernel(True, _define(call)), heads, None, (S0, None), room)
        _launch(call, backward_kernel(_define(call)), heads, None, (dS_end, dS0), room, (do, dq, dk, dv, dg))
    if HK != H:
        dq, dk = (summed(x, HK, x.dtype) for x in (dq, dk))
    return Inputs(dq, dk, dv, dg), by_row(dS0, B)
