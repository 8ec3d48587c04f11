"""What is made once for something, and lives as long as that does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class MadeOnce:
    """Values by their kind, a class or the function that makes them, and by what else they were made for."""

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, ...], Any] = {}

    def __call__(self, kind: Callable[..., T], make: Callable[[], T], *of: Hashable) -> T:
        """What `make` gives, a `kind` or what a function `kind` returns: made once for these."""
        name = (kind, *of)
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]
