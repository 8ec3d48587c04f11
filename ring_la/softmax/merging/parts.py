"""Parts: results of single blocks for some rows, as kernels return them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

DEEPEST = 6
"""Parts kept for a row, on average; more are put together into one."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What lse and accumulators are kept in: fp32, fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def dense(x: Tensor) -> Tensor:
    """`x` with neighbouring numbers in its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Part(NamedTuple):
    """A result of rows ``start … stop − 1``: o, or a gradient, ``[B, n, H, D]``, and of attention lse ``[B, H, n]``."""

    x: Tensor
    lse: Tensor | None
    start: int
    stop: int

    def cut(self, start: int, stop: int) -> Part:
        """Some of its rows."""
        if (start, stop) == (self.start, self.stop):
            return self
        rows = slice(start - self.start, stop - self.start)
        return Part(self.x[:, rows], None if self.lse is None else self.lse[:, :, rows], start, stop)


def stretches(parts: Iterable[Part], length: int) -> Iterator[tuple[int, int, list[Part]]]:
    """The rows 0 … length − 1 cut where any part begins or ends: (start, stop, the parts of these rows)."""
    parts = list(parts)
    cuts = sorted({0, length, *(p.start for p in parts), *(p.stop for p in parts)})
    for a, b in zip(cuts, cuts[1:]):
        yield a, b, [p.cut(a, b) for p in parts if p.start <= a and b <= p.stop]


def too_many(parts: Sequence[Part], length: int) -> bool:
    """Whether rows 0 … length − 1 have more parts than are kept."""
    return sum(p.stop - p.start for p in parts) > DEEPEST * length
