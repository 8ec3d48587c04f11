"""The one handle to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Pending:
    """An exchange under way. ``wait()`` finishes it once and returns its result."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result
