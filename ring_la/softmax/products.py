"""Wide products of narrow matrices, for the few queries of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from .merging import wide


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x [B, M, K] @ y [B, K, N]``, wide. On GPUs a `y` of 16 bits is read as it is, not copied: of a wide `x` two
    numbers of 16 bits each are multiplied, what it rounds to and what is left."""
    if not y.is_cuda or y.dtype not in (torch.bfloat16, torch.float16):
        return x.to(wide(y.dtype)) @ y.to(wide(y.dtype))
    if x.dtype == y.dtype:
        return torch.bmm(x, y, out_dtype=torch.float32)
    first = x.to(y.dtype)
    rest = (x - first.to(x.dtype)).to(y.dtype)
    return torch.bmm(torch.cat([first, rest], 1), y, out_dtype=torch.float32).unflatten(1, (2, -1)).sum(1)
