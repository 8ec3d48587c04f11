"""What the spans of one launch hand on to each other, to another launch, or to other ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAIL = "4Q2q7Q9i4x"
"""Arguments of a kernel that carries states itself, see `Passing.mail`."""


class Passing(NamedTuple):
    """What spans hand on, or (`given`) what enters each. Of a launch that finds `maps` what spans add, (`parts`) their
    transitions, their `image`, the sums of `squares` of these, and which transitions are `zero`; in parts, `together`
    of a span, images of the transitions of each first `half`, and `extra` room for what a part leaves. Of one whose
    spans wait what they combine, `together` at a time.

    `mail`: as `mail.cuh` has it, of a launch that finds what enters spans, and exchanges states with other ranks;
    `arrived`, int32, is what its programs say to each other, and zero at first, by the launch before."""

    states: Tensor
    parts: Tensor | None = None
    together: int = 1
    given: bool = False
    maps: bool = False
    zero: Tensor | None = None
    squares: Tensor | None = None
    half: Tensor | None = None
    extra: Tensor | None = None
    image: Tensor | None = None
    arrived: Tensor | None = None
    mail: tuple[Tensor | int | None, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether spans may wait for each other, by flags that are zero at first."""
        return not self.given and not self.maps
