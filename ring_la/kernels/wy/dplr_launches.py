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
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.spans.heads import summed
from ring_la.kernels.spans.table import cdiv
from ring_la.kernels.wy import gdn_launches
from ring_la.kernels.wy.gdn_launches import CHUNK, GDNCall, KeptChunks
from ring_la.kernels.wy.kda_launches import HEAD, by_row

LEAST = -86.0 * math.log(2) / CHUNK
"""The lowest bound of a gate with which a chunk's factors fit."""
SPANS = 15
"""Of a row, at most."""
ARGUMENTS = "17Q11if"
SHARED = 3 * (58368 + 2304 + 16) + 16 + 16 + 1024
BACKWARD_SHARED = 2 * (81920 + 512 + 32) + 2 * 32768 + 16 + 16 + 16 + 1024


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
    """Heads at a time whose chunks' states are held: groups of about one size."""
    most = max(1, gdn_launches.KEPT // (chunks * 2 * (HEAD * HEAD + CHUNK * HEAD + 4 * CHUNK * CHUNK)))
    return cdiv(heads, math.ceil(heads / most))


def keeps(inputs: Inputs, cu: Tensor | None) -> bool:
    """Whether a forward leaves what a backward wants, or that makes it again."""
    B, T, H = inputs.v.shape[:3]
    return group(B * cdiv(T, CHUNK) if cu is None else T // CHUNK + cu.numel() - 1, H) == H


def _kept(call: GDNCall, heads: int) -> KeptChunks:
    """Room for the states before chunks, Y, and P of k and b, L and M."""
    shape, bf16 = (call.chunks, heads), torch.bfloat16
    return KeptChunks(
        call.new(*shape, HEAD, HEAD, dtype=bf16),
        call.new(*shape, CHUNK, HEAD, dtype=bf16),
        call.new(*shape, 4, CHUNK, CHUNK, dtype=bf16),
    )


def _launch(
    call: GDNCall, kernel: CudaKernel, heads: range, o: Tensor | None, states: tuple[Tensor | None, Tensor | None],
    kept: KeptChunks | tuple[None, None, None], further: tuple[Tensor, ...] = (),
) -> None:  # fmt: skip
    """`states`: those it begins with and those it ends with (gradients, backward)."""
    x, device = call.inputs, call.inputs.v.device
    (_, T, H, _), programs = x.v.shape, call.count * len(heads)
    table = None if call.runs is None else call.runs.table
    flags = torch.zeros(2 * call.count * H + 3 + programs, dtype=torch.int32, device=device)
    kernel(
        programs, *x.qkv, x.a, x.b, x.g, o, *states, table, call.cu, flags,
        call.new(call.count, H, HEAD, HEAD), None, *kept, T, H, x.q.shape[2], call.count, call.length, call.pieces,
        heads.start, len(heads), 0, 1, -call.outer if further else call.outer, call.scale, *further,
    )  # fmt: skip


def forward(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool, keep: bool = False
) -> tuple[Tensor, Tensor | None, KeptChunks | None]:
    """o ``[B, T, H, V]``; if `final` the states that leave the pieces ``[B, N, H, K, V]``, `S0` like those; if `keep`
    what `gradients` take."""
    H, call = inputs.v.shape[2], GDNCall.of(inputs, cu, scale, cut)
    o, leaving = torch.empty_like(call.inputs.v), call.states() if final else None
    kept = _kept(call, H) if keep else None
    entering = None if S0 is None else aligned(S0)
    _launch(call, forward_kernel(keep), range(H), o, (entering, leaving), kept or (None,) * 3)
    return o, None if leaving is None else by_row(leaving, inputs.v.shape[0]), kept


def gradients(
    inputs: Inputs,
    cu: Tensor | None,
    scale: float,
    S0: Tensor | None,
    do: Tensor,
    dS_end: Tensor | None,
    kept: KeptChunks | None,
) -> tuple[Inputs, Tensor]:
    """Those of the inputs, and of the states that enter. `kept`: what `forward` left of the same tokens; None: it is
    made again, as many heads at a time as `gdn_launches.KEPT` bytes hold."""
    (B, T, H, _), HK = inputs.v.shape, inputs.q.shape[2]
    call = GDNCall.of(inputs, cu, scale, cut)
    do = aligned(do.to(torch.bfloat16))
    S0, dS_end = (None if x is None else aligned(x.to(torch.float32)) for x in (S0, dS_end))
    dq, dk, dv, da, db, dg = (call.new(B, T, H, HEAD, dtype=torch.bfloat16) for _ in range(6))
    dS0, each = call.states(), H if kept is not None else group(call.chunks, H)
    room = _kept(call, each) if kept is None else kept
    for first in range(0, H, each):
        heads = range(first, min(first + each, H))
        if kept is None:
            _launch(call, forward_kernel(True), heads, None, (S0, None), room)
        _launch(call, backward_kernel(), heads, None, (dS_end, dS0), room, (do, dq, dk, dv, da, db, dg))
    if HK != H:
        dq, dk = (summed(x, HK, x.dtype) for x in (dq, dk))
    return Inputs(dq, dk, dv, dg, None, da, db), by_row(dS0, B)
