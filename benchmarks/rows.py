"""What benchmarks write: figures as they come, so that a run that is cut off leaves those it had, and what of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save(out: str | Path | None, found: object, indent: int | None = 1) -> None:
    """Write what was found so far as JSON, if a file is asked for, whose folder is made. indent: None where numbers are
    so many that each on a line of its own would be a long file."""
    if out is None:
        return
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(found, indent=indent) + "\n")


def machine() -> dict[str, str]:
    """What figures depend on: the device and PyTorch."""
    import torch  # which processes that only start others do without

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__}


def reason(error: Exception) -> str:
    """Why there is no figure: the error's name and the beginning of its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


class Rows:
    """Each row is a line of JSON on standard output, and after each the file `out` has all there are: a list of them,
    or a dictionary of `about` with the list as its "rows"."""

    def __init__(self, out: str | Path | None, **about: Any) -> None:
        self._out, self._about = out, about
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        save(self._out, self._about | {"rows": self.rows} if self._about else self.rows)
