"""Which backend is the fastest, as data.

A line holds for groups of up to so many rows on average; the first that fits decides, and of its backends the
first that can do the call. `ring-la bench grouped` prints the times to fill these lines from.
"""

from __future__ import annotations

import math

from .product import GroupedProduct

#: product → (rows per group up to, backends from fastest to slowest).
ON_CUDA = {
    "rows": ((math.inf, ("triton", "torch", "cutlass", "loop")),),
    "outer": (
        (256, ("torch", "triton", "cutlass", "loop")),
        (math.inf, ("triton", "torch", "cutlass", "loop")),
    ),
}


def preferred(call: GroupedProduct) -> tuple[str, ...]:
    """The backends to try, fastest first."""
    if call.x.device.type != "cuda":
        return ("loop",)
    return next(order for upto, order in ON_CUDA[call.product] if call.rows_per_group <= upto)
