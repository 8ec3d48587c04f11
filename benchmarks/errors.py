"""How far results are from what they should be."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def relative_error(got: Tensor, true: Tensor) -> float:
    """‖got − true‖ / ‖true‖, in fp64; 0 where both are nothing."""
    got, true = got.detach().double(), true.detach().double()
    return float((got - true).norm() / true.norm().clamp_min(1e-30))


def worst_error(got: Iterable[Tensor], true: Iterable[Tensor]) -> float:
    """The largest one of several."""
    return max(relative_error(a, b) for a, b in zip(got, true))
