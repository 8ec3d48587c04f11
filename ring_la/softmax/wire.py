"""Keys and values in FP8 while they travel: a scale for each token and head, beside its channels.

    s = max |x| / max of the dtype,   x ≈ s · round(x / s)        one message row: D bytes of x / s, 4 of s (fp32)

They are cast before the exchange and cast back by each block that arrives, the rank's own as well: the result does not
depend on who holds a key, and is that of keys so rounded. Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import AttentionBackend, QueryRows
from .geometry import Pair
from .merging import Gradients, Partial, wide
from .scores import Scores

COMM_NAMES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
"""As operators, whose arguments may change from call to call but be no dtype, name them."""
COMM_DTYPES = (*COMM_NAMES,)
SCALE_BYTES = 4


def pack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, D]`` as bytes ``[B, T, H, D + 4]``."""
    x = x.to(wide(x.dtype))
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    scale = (largest / torch.finfo(dtype).max).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale.to(torch.float32)
    low = (x / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return torch.cat([low.view(torch.uint8), scale.view(torch.uint8)], -1)


def unpack(x: Tensor, dtype: torch.dtype, to: torch.dtype) -> Tensor:
    """What `pack` made bytes of, rounded, in the dtype `to`."""
    low, scale = x[..., :-SCALE_BYTES].contiguous(), x[..., -SCALE_BYTES:].contiguous()
    return (low.view(dtype).to(wide(to)) * scale.view(torch.float32)).to(to)


class Unpacking(AttentionBackend):
    """A kernel on keys and values that came as bytes; others, which all ranks hold, it takes as they are."""

    def __init__(self, inner: AttentionBackend, dtype: torch.dtype) -> None:
        self.inner, self.dtype = inner, dtype
        self.name, self.knows, self.fixed_keys = inner.name, inner.knows, inner.fixed_keys

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Partial) -> None:
        if k.dtype == torch.uint8:
            k, v = (unpack(x, self.dtype, q.dtype) for x in (k, v))
        self.inner.forward(q, k, v, scores, pair, out)

    def backward(self, x: QueryRows, k: Tensor, v: Tensor, scores: Scores, pair: Pair, out: Gradients) -> None:
        raise AssertionError("gradients are refused before")
