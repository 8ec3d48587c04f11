"""The power of two that a grid stands on."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(2.0**-80)


@triton.jit
def power_above(x):
    """The power of two above fp32 ``x ≥ 0``, at least LEAST; NaN for what is not finite."""
    up = ((x.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)
    return tl.where(x < float("inf"), tl.maximum(up, LEAST), float("nan"))
