"""What an entry of `MIXERS` is made of beside plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn


class OfLayer(NamedTuple):
    """A function of ours that depends on what its layer says.

    Attributes:
        says: of a layer, a number or None; layers that say the same share a forward.
        make: the function, of what the layer says.
    """

    says: Callable[[nn.Module], float | None]
    make: Callable[[float | None], Callable]
