"""The forgetting horizon: the chunks of a span on which what leaves it still depends, decided by each program.

A chunk's bound is log2 of what the norm of its transition is at most: its decay, or what `put_bound` (`wy/`) leaves.
Where those of a run of chunks add up to −HORIZON or less, nothing that entered the run is left after it, to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

HORIZON = tl.constexpr(43.28)
"""30 in natural logarithms: fp32's unit roundoff, and 14 more."""


@triton.jit
def remembered(last, STEP, n):
    """(how many of n chunks, from the last one back, what leaves depends on; whether anything passes all of them; the
    sum of the bounds). The last chunk's bound is at `last`, that of the chunk before it STEP further."""
    BLOCK: tl.constexpr = 128
    total = 0.0
    count = 1
    for m in range(0, n, BLOCK):
        j = m + tl.arange(0, BLOCK)
        x = tl.load(last + j.to(tl.int64) * STEP, j < n, other=0.0)
        left = (total + tl.cumsum(x, 0) > -HORIZON) & (j < n)  # of what entered chunk j
        count = tl.maximum(count, tl.max(tl.where(left, j + 2, 1), 0))
        total += tl.sum(x, 0)
    return tl.minimum(count, n), total > -HORIZON, total


@triton.jit
def remembered_constant(bound, n):
    """The first of these where the bound of every whole chunk is the same."""
    return tl.minimum((1.0 / tl.maximum(-bound / HORIZON, 1.0 / n)).to(tl.int32) + 2, n)
