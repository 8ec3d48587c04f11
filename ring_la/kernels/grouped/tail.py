"""Zeros for the rows that belong to no group, where a backend leaves them as it found them."""

from __future__ import annotations

import torch
from torch import Tensor

from .product import installed


def zero_tail(out: Tensor, ends: Tensor) -> None:
    """Zero the rows of `out` [M, N] from ``ends[-1]`` on, in place, without asking the device where that is."""
    rows, cols = out.shape
    if out.is_cuda and installed("triton"):
        from ..runtime.launch import launch
        from .triton_kernels import zero_tail as kernel

        sizes = out.stride(0), rows, cols, ends.shape[0]
        launch(kernel, (min(rows, 256),), out, ends, *sizes, BLOCK=1024, num_warps=4, tensors="any")
        return
    out.masked_fill_((torch.arange(rows, device=out.device) >= ends[-1])[:, None], 0)
