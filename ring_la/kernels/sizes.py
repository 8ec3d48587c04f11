"""Sizes of tiles and grids: how many of one size there are in another, and powers of two."""

from __future__ import annotations

import functools


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up (`triton.cdiv` takes several microseconds)."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


@functools.cache
def width(n: int) -> int:
    """Columns or rows of a tile that holds n: the next power of two, at least 16."""
    return max(16, power_of_2(n))
