"""What is made once for something, and lives as long as that does. Its tensors are plain ones: where inference mode
asks first, training may read them later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def plain(make: Callable[P, T]) -> Callable[P, T]:
    """`make` outside of inference mode, whose tensors autograd does not save."""

    @functools.wraps(make)
    def made(*args: P.args, **keywords: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return make(*args, **keywords)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **keywords)

    return made


def once(make: Callable[[S], T]) -> functools.cached_property[T]:
    """A cached property of plain tensors."""
    return functools.cached_property(plain(make))


class MadeOnce:
    """Values by their kind, a class or the function that makes them, and by what else they were made for."""

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, ...], Any] = {}

    def __call__(self, kind: Callable[..., T], make: Callable[[], T], *of: Hashable) -> T:
        """What `make` gives, a `kind` or what a function `kind` returns: made once for these."""
        name = (kind, *of)
        if name not in self._made:
            self._made[name] = plain(make)()
        return self._made[name]
