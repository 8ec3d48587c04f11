"""The sections of a benchmark's report, from the JSON that `ring-la bench` writes: a picture a case."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from ..errors import ArgumentError
from . import plots

Section = tuple[str, str]
CASES = 200
"""Pictures in one report at most; what is more is counted."""


def sections(found: Any, name: str) -> list[Section]:
    """All of them.

    Raises:
        ArgumentError: nothing of a benchmark's.
    """
    rows = found.get("rows") or found.get("times") if isinstance(found, Mapping) else None
    cases: dict[str, dict[str, float]] = {}
    for row in rows or ():
        for case, arm, ms in _times(row):
            cases.setdefault(case, {})[arm] = ms
    if not cases:
        expected = 'JSON of `ring-la bench` with "rows" of times, or a training run\'s folder'
        raise ArgumentError("RUN", expected, name)
    machine = found.get("machine") or {k: v for k, v in found.items() if isinstance(v, (str, int, float))}
    cells = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in machine.items())
    out = [("Machine", f"<table>{cells}</table>")]
    for case, arms in list(cases.items())[:CASES]:
        out.append((case, plots.bars(sorted(arms.items(), key=lambda arm: arm[1]), "ms")))
    if len(cases) > CASES:
        out.append(("More", f"<p>{len(cases) - CASES} more cases are in {escape(name)}.</p>"))
    return out


def _times(row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(case, arm, ms) of a row of `bench scan`, `grouped`, `ops` or `attention`."""
    if isinstance(row.get("ms"), Mapping) and "G" in row:
        return [(f"{row['kind']}, G {row['G']}, sizes {row['sizes']}", arm, ms) for arm, ms in row["ms"].items()]
    if isinstance(row.get("ms"), Mapping):
        case = f"{row['op']}, gates {row['gates']}, P {row['P']}, T {row['T']}, {row['what']}, {row['mode']}"
        return [(case, arm, ms) for arm, ms in row["ms"].items()]
    if isinstance(row.get("sides"), Mapping):
        both = {"fwd": "forward", "fwd_bwd": "forward + backward"}
        return [
            (f"{row['op']}, {row['shape']}, {said}", side, times[key])
            for side, times in row["sides"].items()
            for key, said in both.items()
            if key in times
        ]
    if "name" in row and "total" in row:
        case = f"{row['case']}, P {row['P']}, T {row['T']}, forward + backward"
        return [(case, row["name"], row["total"])]
    return []
