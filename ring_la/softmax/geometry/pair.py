"""Two sides of a block under a mask. What follows from them is made once and lives as long as both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from ...kept import MadeOnce
from .tokens import ANY_DOCUMENT, Tokens

P = ParamSpec("P")
T = TypeVar("T")


class Reach(NamedTuple):
    """How many positions back and ahead a query sees; None: all. Causal attention has 0 ahead."""

    left: int | None = None
    right: int | None = None

    @property
    def windowed(self) -> bool:
        """Whether more than order bounds it."""
        return self.left is not None or self.right not in (None, 0)

    def visible(self, distance: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Mask of pairs from ``p_j − p_i`` and the documents of rows ``q [Tq]`` and ``k [Tk]``."""
        seen = (q[:, None] == k[None, :]) | (k == ANY_DOCUMENT)[None, :]
        if self.right is not None:
            seen &= distance <= self.right
        if self.left is not None:
            seen &= distance >= -self.left
        return seen


class Pair:
    """Queries that stand at `rows` against keys that stand at `keys`, as far as `reach` lets them see."""

    def __init__(self, rows: Tokens, keys: Tokens, reach: Reach) -> None:
        self.rows, self.keys, self.reach = rows, keys, reach

    @cached_property
    def kept(self) -> MadeOnce:
        """What is made once for these sides and this reach."""
        return self.rows.met.setdefault(self.keys, {}).setdefault(self.reach, MadeOnce())


def once(make: Callable[Concatenate[Pair, P], T]) -> Callable[Concatenate[Pair, P], T]:
    """Decorator: what a function of a pair returns is kept with the pair's sides."""

    @wraps(make)
    def kept(pair: Pair, *more: P.args, **keywords: P.kwargs) -> T:
        return pair.kept(make, lambda: make(pair, *more, **keywords), *more, *keywords.items())

    return kept
