"""Numbers that are zero at first, for a kernel that may begin meanwhile (`CudaKernel.early`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ring_la.kernels.runtime.cuda_kernel import CudaKernel, unsupported

THREADS, EACH = 128, 8
"""Of a program, and numbers of a thread."""
ZEROS = CudaKernel(
    Path(__file__).parent / "zeros.cu", "zeros", "Qi4x", THREADS, 0, (f"THREADS={THREADS}", f"EACH={EACH}")
)


def zeros(count: int, device: torch.device) -> Tensor:
    """int32 ``[count]``, see `clear`."""
    return clear(torch.empty(count, dtype=torch.int32, device=device))


def clear(x: Tensor) -> Tensor:
    """Set int32 `x`, contiguous, to zero: on a GPU by a launch that lets the next one begin, where that waits itself
    (`launch_before`)."""
    if x.device.type != "cuda" or unsupported():
        return x.zero_()
    ZEROS(-(-x.numel() // (THREADS * EACH)), x, x.numel())
    return x
