"""Which layout a tensor was split by, remembered for the tensors that layouts themselves gave.

Operations on a tensor lose its mark, so a missing mark says nothing; a mark that is there is right.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError
from ..layout import Layout
from .arguments import describe

SAMPLE = 2**20
"""Elements of a tensor that its fingerprint is made of, evenly spread, at most."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mark(NamedTuple):
    """How a tensor was split."""

    layout: Layout
    whole: int | None = None
    """The fingerprint of the whole sequence it is part of, where one was taken."""


class Marks:
    """The marks of tensors that are alive."""

    def __init__(self) -> None:
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def put(self, x: Tensor, layout: Layout, whole: int | None = None) -> None:
        """Note that `x` is split by a layout. Within a compiled graph nothing is noted."""
        if not torch.compiler.is_compiling() and type(x) is Tensor:
            self._of[x] = Mark(layout, whole)

    def get(self, x: object) -> Mark | None:
        """The mark of a tensor, if it has one."""
        return self._of.get(x) if type(x) is Tensor else None

    def require(self, name: str, x: object, layout: Layout) -> None:
        """Refuse an argument that is known to be split by another layout.

        Raises:
            ArgumentError: naming it, and both layouts.
        """
        mark = self.get(x)
        if mark is not None and not _alike(mark.layout, layout):
            hint = "Take it from the layout in use, or bring it there with layout.convert(x, other_layout)"
            expected, got = (f"split by the layout of {describe(x)}" for x in (layout, mark.layout))
            raise ArgumentError(name, f"a tensor {expected}", f"one {got}", hint)


def _alike(one: Layout, other: Layout) -> bool:
    """Whether every rank owns the same tokens under both; the answer is the same on all ranks."""
    if one.split == other.split:
        return True
    return one.lengths == other.lengths and torch.equal(one.order, other.order)


def fingerprint(x: Tensor) -> int:
    """A number that two tensors share if they hold the same bits, and hardly otherwise; of at most `SAMPLE` elements.

    Integers modulo 2⁶⁴ add up to the same in any order, so neither threads nor devices change it. Synchronises.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    bits = x.detach().contiguous().view(BITS[x.element_size()]).flatten()
    bits = bits[:: -(-max(1, len(bits)) // SAMPLE)].to(torch.int64)
    weights = torch.arange(len(bits), device=bits.device).mul_(0x1E3779B97F4A7C2).add_(1)  # odd: no bit is lost
    return int((bits * weights).sum())
