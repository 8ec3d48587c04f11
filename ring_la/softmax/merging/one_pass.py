"""Parts put together by kernels, as many at a time as one launch takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .parts import Part, has_triton, wide


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether parts are put together by one Triton kernel."""
    return device.type == "cuda" and wide(dtype) == torch.float32 and has_triton()


def write(o: Tensor, lse: Tensor | None, parts: Sequence[Part]) -> None:
    """Write what parts make into `o` and, of attention, `lse`: fused, some at a time if they are many."""
    from . import fused  # needs Triton

    while len(parts) > fused.MOST:
        first, last = min(p.start for p in parts[: fused.MOST]), max(p.stop for p in parts[: fused.MOST])
        moved = [p._replace(start=p.start - first, stop=p.stop - first) for p in parts[: fused.MOST]]
        some = Part(
            torch.empty_like(o[:, first:last], dtype=torch.float32),
            None if lse is None else torch.empty_like(lse[:, :, first:last]),
            first,
            last,
        )
        fused.add(some.x, moved) if lse is None else fused.merge(some.x, some.lse, moved)
        parts = [*parts[fused.MOST :], some]
    fused.add(o, parts) if lse is None else fused.merge(o, lse, parts)


def holds(parts: Sequence[Part], length: int, dtype: torch.dtype) -> bool:
    """Whether the first of several parts can hold what they make: it has all rows in the right dtype."""
    if len(parts) < 2 or not fuses(parts[0].x.device, dtype):
        return False
    x, lse, start, stop = parts[0]
    of_lse = lse is None or (lse.dtype == torch.float32 and lse.is_contiguous())
    return (start, stop) == (0, length) and x.dtype == dtype and x.is_contiguous() and of_lse


def into_first(parts: Sequence[Part]) -> Part:
    """The first part, with the others put into the rows that they have."""
    base, *others = parts
    first, last = min(p.start for p in others), max(p.stop for p in others)
    own = base.cut(first, last)
    moved = [p._replace(start=p.start - first, stop=p.stop - first) for p in (own, *others)]
    write(own.x, own.lse, moved)
    return base
