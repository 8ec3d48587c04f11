"""Rows of a benchmark as they come, so that a run that is cut off leaves those it had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Rows:
    """Each row is a line of JSON on standard output, and after each the file `out` has all there are: a list of them,
    or a dictionary of `about` with the list as its "rows"."""

    def __init__(self, out: str | Path | None, **about: Any) -> None:
        self._out, self._about = None if out is None else Path(out), about
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self._about | {"rows": self.rows} if self._about else self.rows, indent=1))
