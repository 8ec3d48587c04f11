"""The forwards a parallelized model runs: the library's own, with our mixers inside in a split call."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ...errors import UnsupportedError
from .call import Current
from .mixers import asked_of, entry_of, make_forward


class ModuleForwards:
    """The forward of every class of modules, made once, or once for modules that say the same (`OfLayer`)."""

    def __init__(self, current: Current) -> None:
        self.current = current
        self._asked: dict[type, tuple[Callable, ...]] = {}
        self._made: dict[tuple[Any, ...], Callable] = {}

    def of(self, module: Any) -> Callable:
        """The forward of a module, ours inside where its class has an entry."""
        kind = type(module)
        if kind not in self._asked:
            self._asked[kind] = asked_of(kind)
        key = kind, *[says(module) for says in self._asked[kind]]
        if key not in self._made:
            self._made[key] = kind.forward if entry_of(kind) is None else make_forward(module, self.current)
        return self._made[key]

    def put(self, module: Any, name: str, forward: Callable, undo: ExitStack) -> None:
        """Give a module, of this name in its model, a forward of its own; `undo` takes the way back."""
        if "forward" in vars(module):
            got = f"{name or type(module).__name__} with a forward of its own"
            raise UnsupportedError("model", "modules as their classes make them, no hooks of Accelerate", got)
        self.of(module)
        module.forward = types.MethodType(forward, module)
        undo.callback(delattr, module, "forward")


def mixer_forward(self: Any, *args, **keywords):
    """The forward of a module whose class has an entry in `mixers.MIXERS`."""
    return self._ring_la.forwards.of(self)(self, *args, **keywords)


def known(function: Callable, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords a model's forward takes. One without position_ids passes the check only if it needs none."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: x for n, x in keywords.items() if anything or n in parameters}
