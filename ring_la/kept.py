"""What is made once for something, and lives as long as that does. Its tensors are plain ones: where inference mode
asks first, training may read them later."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
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


_written: list[list[Any]] = []
"""Of each graph that is being written, what caches gave it."""


@contextlib.contextmanager
def for_a_graph() -> Iterator[list[Any]]:
    """What `recent` functions give within, for the graph that is written to keep as long as it reads their memory."""
    _written.append([])
    try:
        yield _written[-1]
    finally:
        _written.pop()


def recent(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A cache of as many results with tensors, the latest ones (`functools.lru_cache`). A graph (`for_a_graph`) keeps
    those that it reads, which the cache forgets: no replay asks for them."""

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        known = functools.lru_cache(maxsize=most)(plain(make))

        @functools.wraps(make)
        def found(*of: P.args, **keywords: P.kwargs) -> T:
            out = known(*of, **keywords)  # type: ignore[arg-type]
            for tables in _written:
                tables.append(out)
            return out

        return found

    return decorate


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
