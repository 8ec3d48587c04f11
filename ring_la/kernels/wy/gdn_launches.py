"""Launches of the delta rules' kernel in CUDA C++ on Hopper (`gdn_forward.cu`): one forward, with gates or without.

Chunks have 32 tokens. Spans are long, since one may begin up to sixteen chunks early, or waits for the one before it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.runtime.launch import aligned
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.spans.table import cdiv
from ring_la.kernels.wy.kda_launches import HEAD, by_row, multiprocessors

CHUNK = 32
"""Tokens a chunk."""
SHORTEST, LONGEST = 512, 4096
"""Tokens a span, where pieces are cut: those of another span that one may begin with are 512 at most."""
ARGUMENTS = "15Q7if"
SHARED = 7 * 31744 + 7 * 16 + 16 + 80 + 1024
BACKWARD_SHARED = 198656 + 1024 + 2048 + 64 + 2 * 32 + 2 * 16 + 16 + 80 + 1024
KEEPING_SHARED = 6 * 33792 + 8192 + 6 * 16 + 16 + 80 + 1024


class Kept(NamedTuple):
    """What a backward wants of chunks: the states before them, W (U by beta) and their pairs."""

    states: Tensor
    writes: Tensor
    pairs: Tensor


@functools.cache
def forward_kernel(keep: bool, *defines: str) -> CudaKernel:
    defines, shared = (f"KEEP={int(keep)}", *defines), KEEPING_SHARED if keep else SHARED
    return CudaKernel(Path(__file__).parent / "gdn_forward.cu", "gdn_forward", ARGUMENTS, 384, shared, defines)


@functools.cache
def backward_kernel(*defines: str) -> CudaKernel:
    file = Path(__file__).parent / "gdn_backward.cu"
    return CudaKernel(file, "gdn_backward", ARGUMENTS + "6Q", 384, BACKWARD_SHARED, defines)


def span(tokens: int, heads: int, pieces: int, programs: int) -> int:
    """Tokens a span, of `programs` that run at a time: pieces stay whole where there are as many. Else a program gets
    about two spans, a power of two, since one that waits for the state of another goes over its tokens three times."""
    if pieces * heads >= programs:
        return cdiv(tokens, CHUNK) * CHUNK
    each = max(1, tokens * heads // (2 * programs))
    return min(max(1 << round(math.log2(each)), SHORTEST), LONGEST)


@dataclass(frozen=True)
class GDNCall:
    """One device's tokens, as the kernels take them.

    Attributes:
        inputs: q, k, v bf16, g (None: no decay) and beta fp32 or bf16; contiguous, batch rows one behind the other.
        pieces: documents, or batch rows. length: tokens a span. count, chunks: how many spans and chunks at most.
        runs: the spans of packed documents; None: rows are cut evenly.
    """

    inputs: Inputs
    cu: Tensor | None
    scale: float
    pieces: int
    length: int
    count: int
    chunks: int
    runs: Runs | None

    @classmethod
    def of(cls, inputs: Inputs, cu: Tensor | None, scale: float) -> GDNCall:
        q, k, v, g, beta = (None if x is None else aligned(x) for x in inputs[:5])
        q, k = (x if x.dtype == v.dtype else x.to(v.dtype) for x in (q, k))
        g, beta = (x if x is None or x.dtype in (torch.float32, torch.bfloat16) else x.float() for x in (g, beta))
        B, T, H = v.shape[:3]
        pieces = B if cu is None else cu.numel() - 1
        length, inputs = span(B * T, H, pieces, multiprocessors(v.device)), Inputs(q, k, v, g, beta)
        if cu is None:
            return cls(inputs, None, scale, pieces, length, B * cdiv(T, length), B * cdiv(T, CHUNK), None)
        cu = aligned(cu.to(device=v.device, dtype=torch.int32))
        runs = Runs.of(T, length, CHUNK, cu)
        return cls(inputs, cu, scale, pieces, length, runs.count, T // CHUNK + pieces, runs)

    @property
    def defines(self) -> tuple[str, str, str]:
        g, beta = self.inputs.g, self.inputs.beta
        bf16 = torch.bfloat16
        return (
            f"GATED={int(g is not None)}",
            f"GATE_BF16={int(g is not None and g.dtype == bf16)}",
            f"BETA_BF16={int(beta.dtype == bf16)}",
        )

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.inputs.v.device, dtype=dtype)

    def states(self) -> Tensor:
        """Room for the state of every piece."""
        return self.new(self.pieces, self.inputs.v.shape[2], HEAD, HEAD)

    def kept(self) -> Kept:
        """Room for what a backward wants of chunks."""
        shape, bf16 = (self.chunks, self.inputs.v.shape[2]), torch.bfloat16
        return Kept(
            self.new(*shape, HEAD, HEAD, dtype=bf16),
            self.new(*shape, CHUNK, HEAD, dtype=bf16),
            self.new(*shape, 2, CHUNK, CHUNK, dtype=bf16),
        )

    def launch(
        self, kernel: CudaKernel, o: Tensor | None, states: tuple[Tensor | None, Tensor | None],
        kept: Kept | tuple[None, None, None], further: tuple[Tensor | None, ...] = (),
    ) -> None:  # fmt: skip
        """`states`: those it begins with and those it ends with (gradients, backward)."""
        T, H = self.inputs.v.shape[1:3]
        flags = torch.zeros(2 * self.count * H + 1, dtype=torch.int32, device=self.inputs.v.device)
        passed = self.new(self.count, H, HEAD, HEAD)
        table = None if self.runs is None else self.runs.table
        kernel(
            self.count * H, *self.inputs[:5], o, *states, table, self.cu, flags, passed, *kept,
            T, H, self.inputs.q.shape[2], self.count, self.length, self.pieces, 1, self.scale, *further,
        )  # fmt: skip


def forward(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool, keep: bool = False
) -> tuple[Tensor, Tensor | None, Kept | None]:
    """o ``[B, T, H, V]``; if `final` the states that leave the pieces ``[B, N, H, K, V]``, `S0` like those; if `keep` what
    `gradients` take."""
    call = GDNCall.of(inputs, cu, scale)
    o, leaving = torch.empty_like(call.inputs.v), call.states() if final else None
    kept = call.kept() if keep else None
    entering = None if S0 is None else aligned(S0)
    call.launch(forward_kernel(keep, *call.defines), o, (entering, leaving), kept or (None,) * 3)
    return o, None if leaving is None else by_row(leaving, inputs.v.shape[0]), kept


def gradients(
    inputs: Inputs, cu: Tensor | None, scale: float, do: Tensor, dS_end: Tensor | None, kept: Kept
) -> tuple[Inputs, Tensor]:
    """Those of the inputs, and of the states that enter. `kept`: what `forward` left."""
    (B, T, H, _), HK = inputs.v.shape, inputs.q.shape[2]
    call = GDNCall.of(inputs, cu, scale)
    do = aligned(do.to(torch.bfloat16))
    dS_end = None if dS_end is None else aligned(dS_end.to(torch.float32))
    dq, dk, dv = (call.new(B, T, H, HEAD, dtype=torch.bfloat16) for _ in range(3))
    g, dbeta, dS0 = call.inputs.g, call.new(B, T, H), call.states()
    dg = None if g is None else torch.empty_like(g)
    call.launch(backward_kernel(*call.defines), None, (dS_end, dS0), kept, (do, dq, dk, dv, dg, dbeta))
    if HK != H:
        dq, dk = (x.view(B, T, HK, -1, HEAD).sum(3, dtype=torch.float32).to(x.dtype) for x in (dq, dk))
    return Inputs(dq, dk, dv, dg, dbeta), by_row(dS0, B)
