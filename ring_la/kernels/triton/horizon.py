"""The forgetting horizon: the chunks of a segment on which what leaves it still depends, decided by each program.

`bounds` [B, H, chunks] has log2 of what the norm of each chunk's transition is at most (`intra.put_bound`).
Where those of a run of chunks add up to −HORIZON or less, nothing that entered the run is left after it, to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

HORIZON = tl.constexpr(43.28)
"""30 in natural logarithms: fp32's unit roundoff, and 14 more."""


@triton.jit
def remembered(bounds, n):
    """(how many of n chunks, from the last one back, what leaves depends on; whether anything passes all of them)."""
    BLOCK: tl.constexpr = 128
    total = 0.0
    count = n
    for m in range(0, n, BLOCK):
        j = m + tl.arange(0, BLOCK)
        x = tl.load(bounds + n - 1 - j, j < n, other=0.0)
        gone = (total + tl.cumsum(x, 0) <= -HORIZON) & (j < n)
        count = tl.minimum(count, tl.min(tl.where(gone, j + 1, n), 0))
        total += tl.sum(x, 0)
    return count, total > -HORIZON
