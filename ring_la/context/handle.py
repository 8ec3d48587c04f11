"""Handles of something of this process: a group, a layout of one."""

from __future__ import annotations

from ..errors import UnsupportedError


class OfThisProcess:
    """A handle of something of this process: a copy is the handle itself, and there is no pickle."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __reduce__(self):
        hint = "Pickle what it was made of, and make another there"
        raise UnsupportedError(type(self).__name__, "one that stays in its process", "a pickle", hint)
