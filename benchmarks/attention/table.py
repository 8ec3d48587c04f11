"""The table that docs/users/benchmarks.md holds of `bench attention`'s figures: a line a row of the files given."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator

from ..options import earlier

HEAD = ("case", "tokens a rank", "", "forward", "share", "with backward", "share", "in a row", "CUDA graph", "peak")


def table(files: Iterable[pathlib.Path]) -> Iterator[str]:
    """The lines of a Markdown table, ms and GiB."""
    yield _line(HEAD)
    yield "|---" * len(HEAD) + "|"
    for file in files:
        for row in earlier(file)["rows"]:
            name = row["name"].removeprefix("ring_la ")
            times = (f(row, n) for n in ("forward", "total") for f in (_time, _share))
            peak = f"{row['peak']:.2f}"
            yield _line((row["case"], f"{row['T']:,}", name, *times, _pair(row, "row_"), _pair(row, "graph_"), peak))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(row: dict, name: str) -> str:
    return f"{row[name]:.2f}" if name in row else ""


def _share(row: dict, name: str) -> str:
    return f"{row[f'share_{name}']:.0%}" if name in row else ""


def _pair(row: dict, prefix: str) -> str:
    """Forward and forward + backward with their shares, where this was measured."""
    names = [prefix + n for n in ("forward", "total")]
    if not all(n in row for n in names):
        return ""
    return f"{', '.join(_time(row, n) for n in names)} ({', '.join(_share(row, n) for n in names)})"
