"""Launches of the delta rules' kernel in CUDA C++ on Hopper (`gdn_forward.cu`): one forward, with gates or without.

Chunks have 32 tokens. Spans are long, since one may begin up to sixteen chunks early, or waits for the one before it.
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
from ring_la.kernels.spans.runs import Runs
from ring_la.kernels.spans.table import cdiv
from ring_la.kernels.wy.kda_launches import HEAD, multiprocessors

CHUNK = 32
"""Tokens a chunk."""
SHORTEST, LONGEST = 512, 4096
"""Tokens a span, where pieces are cut: those of another span that one may begin with are 512 at most."""
ARGUMENTS = "12Q7if"
SHARED = 7 * 31744 + 7 * 16 + 16 + 80 + 1024


@functools.cache
def kernel(*defines: str) -> CudaKernel:
    return CudaKernel(Path(__file__).parent / "gdn_forward.cu", "gdn_forward", ARGUMENTS, 384, SHARED, defines)


def span(tokens: int, heads: int, pieces: int, programs: int) -> int:
    """Tokens a span, of `programs` that run at a time: pieces stay whole where there are as many. Else a program gets
    about two spans, a power of two, since one that waits for the state of another goes over its tokens three times."""
    if pieces * heads >= programs:
        return cdiv(tokens, CHUNK) * CHUNK
    each = max(1, tokens * heads // (2 * programs))
    return min(max(1 << round(math.log2(each)), SHORTEST), LONGEST)


def forward(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """o ``[B, T, H, V]``, and if `final` the states that leave the pieces ``[B, N, H, K, V]``; `S0` like those."""
    q, k, v, g, beta = (None if x is None else aligned(x) for x in inputs[:5])
    q, k = (x if x.dtype == v.dtype else x.to(v.dtype) for x in (q, k))
    g, beta = (x if x is None or x.dtype in (torch.float32, torch.bfloat16) else x.float() for x in (g, beta))
    B, T, H = v.shape[:3]
    pieces = B if cu is None else cu.numel() - 1
    length = span(B * T, H, pieces, multiprocessors(v.device))
    if cu is None:
        count, runs = B * cdiv(T, length), None
    else:
        cu = aligned(cu.to(device=v.device, dtype=torch.int32))
        runs = Runs.of(T, length, CHUNK, cu)
        count = runs.count
    o = torch.empty_like(v)
    leaving = v.new_empty(pieces, H, HEAD, HEAD, dtype=torch.float32) if final else None
    flags = torch.zeros(2 * count * H + 1, dtype=torch.int32, device=v.device)
    passed = v.new_empty(count, H, HEAD, HEAD, dtype=torch.float32)
    defines = (
        f"GATED={int(g is not None)}",
        f"GATE_BF16={int(g is not None and g.dtype == torch.bfloat16)}",
        f"BETA_BF16={int(beta.dtype == torch.bfloat16)}",
    )
    kernel(*defines)(
        count * H, q, k, v, g, beta, o, None if S0 is None else aligned(S0), leaving, runs and runs.table, cu, flags,
        passed, T, H, q.shape[2], count, length, pieces, 1, scale,
    )  # fmt: skip
    if leaving is not None:
        leaving = leaving[:, None] if B > 1 else leaving[None]
    return o, leaving
