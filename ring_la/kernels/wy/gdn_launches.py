"""Launches of the gated delta rule's kernel in CUDA C++ on Hopper (`gdn_forward.cu`): one forward.

Chunks have 32 tokens. Spans are long, since one may begin up to sixteen chunks early.
"""

from __future__ import annotations

import functools
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
SPAN = 2048
"""Tokens a span at least: those of another span that one may begin with are 512."""
ARGUMENTS = "12Q7if"
AHEAD = 1
SHARED = 7 * 31744 + 7 * 16 + 16 + 80 + 1024


@functools.cache
def kernel(*defines: str) -> CudaKernel:
    return CudaKernel(Path(__file__).parent / "gdn_forward.cu", "gdn_forward", ARGUMENTS, 384, SHARED, defines)


def forward(
    inputs: Inputs, cu: Tensor | None, scale: float, S0: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """o ``[B, T, H, V]``, and if `final` the states that leave the pieces ``[B, N, H, K, V]``; `S0` like those."""
    q, k, v, g, beta = (None if x is None else aligned(x) for x in inputs[:5])
    q, k = (x if x.dtype == v.dtype else x.to(v.dtype) for x in (q, k))
    g, beta = (x if x is None or x.dtype in (torch.float32, torch.bfloat16) else x.float() for x in (g, beta))
    B, T, H = v.shape[:3]
    pieces = B if cu is None else cu.numel() - 1
    wanted = max(1, multiprocessors(v.device) // (H * pieces))
    length = max(SPAN, cdiv(cdiv(B * T, pieces * wanted), CHUNK) * CHUNK)
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
        passed, T, H, q.shape[2], count, length, pieces, AHEAD, scale,
    )  # fmt: skip
    if leaving is not None:
        leaving = leaving[:, None] if B > 1 else leaving[None]
    return o, leaving
