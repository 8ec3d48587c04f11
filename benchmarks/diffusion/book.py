"""The rows of a run: written as they come, each within a time limit, with the reason where one cannot be.

A peer may hang where its ranks wait for each other. What takes longer than the limit ends this process, by putting
another in its place (`exec`), which goes on with the rows that are missing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ..options import earlier
from ..rows import reason, save

Result = TypeVar("Result")
_books = itertools.count()
NAMED = ("model", "arm", "mode", "size")
"""What names a row. One that has no mode or size stands for all."""


class Book:
    """The rows of a run. All ranks call alike.

    Attributes:
        rows: so far.
    """

    def __init__(self, options: argparse.Namespace, head: Mapping[str, Any]) -> None:
        self.file: Path | None = options.out
        self.seconds, self._head, self._met, self._number = options.limit, head, 0, next(_books)
        kept = options.resume and self.file is not None and self.file.exists()
        self.rows: list[dict[str, Any]] = earlier(self.file)["rows"] if kept and self.file is not None else []
        self._first = dist.get_rank() == 0

    def has(self, **named: str) -> bool:
        """Whether there is a row of that name, or one that stands for it."""
        return any(all(row.get(n, named[n]) == named[n] for n in NAMED if n in named) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Print it, and write the file."""
        self.rows.append(row)
        if self._first:
            print("  ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)
            save(self.file, dict(self._head) | {"rows": self.rows})

    def attempt(self, what: dict[str, Any], work: Callable[[], Result]) -> Result | None:
        """The work's result; None where it cannot be on some rank, and a row that says why."""
        timer = threading.Timer(self.seconds, self._again, (what,))
        timer.daemon = True
        timer.start()
        result, why = None, ""
        try:
            result = work()
        except Exception as error:  # a peer's reason is a row of the table
            why = reason(error)
        reasons = self._meet(why)
        timer.cancel()
        found = next(filter(None, reasons), "")
        if found:
            self.add(what | {"cannot": found})
            return None
        return result

    def _meet(self, word: str) -> Iterable[str]:
        """What every rank says. On the host: a device may be waiting for ever."""
        store, self._met = dist.distributed_c10d._get_default_store(), self._met + 1
        place = f"book {self._number}/{self._met}"
        store.set(f"{place}/{dist.get_rank()}", word)
        return [store.get(f"{place}/{r}").decode() for r in range(dist.get_world_size())]

    def _again(self, what: dict[str, Any]) -> None:
        """From a thread of its own, on every rank: this process is of no use any more."""
        self.add(what | {"cannot": f"no answer in {self.seconds:g} s"})
        sys.stdout.flush()
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if self.file is None or count is None:
            print("the rows behind it are left out: a run under torchrun, with --out, goes on", flush=True)
            os._exit(1)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(count) + 1)  # under which the ranks meet anew
        more = [] if "--resume" in sys.argv else ["--resume"]
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *more])


def _short(x: object) -> str:
    """As a row shows it."""
    if isinstance(x, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in x.items())
    if isinstance(x, list):
        return "".join(f"\n    {' '.join(map(_short, row))}" for row in x)
    return f"{x:.4g}" if isinstance(x, float) else str(x)
