"""Handles of something of this process: a group, a layout of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UnsupportedError

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
