"""Handles of something of this process: a group, a layout of one, and the numbers operators know them by.

The schema of a registered operator has no place for a handle, and a compiled graph that held one would be another for
each. So every handle has a number: to a compiler an integer like any other, which may change from call to call.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ArgumentError, UnsupportedError

KEPT = 64
"""So many of the handles that operators asked for last live on: a backward pass may come when their owner is gone."""

_numbers = itertools.count(1 << 20)  # unlike any length, which a compiler would take for the same number
_handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_recent: OrderedDict[int, Any] = OrderedDict()


def enter(handle: Any) -> int:
    """A number under which `found` gives `handle`, as long as that lives."""
    number = next(_numbers)
    _handles[number] = handle
    return number


def found(number: int, keep: bool = True) -> Any:
    """The handle of a number; `keep`: among those that live on, which is not for what holds a model's weights."""
    handle = _handles.get(number)
    if handle is None:
        expected = f"a handle that lives, or is one of the {KEPT} that compiled calls used last"
        raise ArgumentError("layout", expected, f"number {number}, which is gone", "Keep it until the backward pass")
    if keep:
        _recent[number] = handle
        _recent.move_to_end(number)
        if len(_recent) > KEPT:
            _recent.popitem(last=False)
    return handle


def number_of(layout: Any) -> int:
    """The number of a layout, 0 for None: what an operator takes that one device calls, too."""
    return 0 if layout is None else layout.number


def layout_of(number: int) -> Any:
    """What `number_of` was given."""
    return found(number) if number else None


if TYPE_CHECKING:
    from typing_extensions import Self


class OfThisProcess:
    """A handle of something of this process: a copy is the handle itself, and there is no pickle."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        hint = "Pickle what it was made of, and make another there"
        raise UnsupportedError(type(self).__name__, "one that stays in its process", "a pickle", hint)
