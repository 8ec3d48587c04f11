"""Partial results of softmax attention, put together.

Two results over disjoint keys merge as  ``lse = log(exp a + exp b)``,  ``o = exp(a − lse) oₐ + exp(b − lse) o_b``;
the order does not matter. A row that has seen no key has lse = −∞ and o = 0.

Parts are kept as kernels return them, and read once, when the whole is asked for: no accumulator is filled, read and
written again for each block. A kernel that accumulates by itself asks for one with ``wide()``.
"""

from .partial import Partial
from .parts import dense, has_triton, wide
from .sums import Gradients, Sum, row_sums

__all__ = ["Gradients", "Partial", "Sum", "dense", "has_triton", "row_sums", "wide"]
