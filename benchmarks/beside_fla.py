"""Every recurrence that fla-core 0.6.0 has too, beside it: one row each, out of the results of ``bench ops``.

    python -m benchmarks.beside_fla

A row is of the newest file that has both sides, timed alone in one run, 1 x 8,192 tokens, 32 heads of 128 (Mamba-2:
1 x 32,768, 80 heads); if there is a newer one of ours alone, its times stand beside fla-core's older ones, marked †.
The mean is geometric, a recurrence a row, and is given with † and without; rows of which fla-core's side is far
from ours (‡: a fault, or another definition) are in neither.
"""

from __future__ import annotations

import json
import statistics
from typing import Any, NamedTuple

from . import ROOT
from .ops.cases import CASES

SHAPE, OWN = "1x8192x32x128", {"mamba2": "1x32768x80x128x64"}
NEWEST_FIRST = (
    "rwkv7-fla", "near", "near-own", "near-fla-before", "forgetting-fla", "recurrences-fla-3", "recurrences-fla-2",
    "recurrences-fla", "momentum-ops", "slow-recurrences-2", "slow-recurrences", "recurrences-erase",
    "recurrences", "ops",
)  # fmt: skip
"""Files of benchmarks/results, less ``-h200.json``."""
WITHOUT = ("hgrn2", "mlstm", "mamba3", "mamba3_mimo")
"""Recurrences that fla-core has no operator of (its HGRN-2 is its GLA; its IPLR is our `dplr` without a decay)."""
WRONG = 2e-2
"""An error that no rounding explains: five times what bf16 rounds here."""
NAMES = [
    name
    for name, case in CASES.items()
    if not (case.step or case.gates or name in (*WITHOUT, "bidirectional"))
    and (case.definition is not None or name in ("log_linear_attention", "forgetting_attention"))
]


class Row(NamedTuple):
    """ms forward and with backward, the largest errors, and whether both sides are of one run."""

    name: str
    ours: tuple[float, float]
    theirs: tuple[float, float]
    errors: tuple[float, float]
    together: bool

    @property
    def ratios(self) -> tuple[float, float]:
        return self.theirs[0] / self.ours[0], self.theirs[1] / self.ours[1]

    @property
    def right(self) -> bool:
        """Whether fla-core's results are the recurrence's."""
        return self.errors[1] < WRONG

    @property
    def mark(self) -> str:
        """What is to be known of the row."""
        return ("" if self.together else " †") + ("" if self.right else " ‡")


def rows() -> tuple[list[Row], list[str]]:
    """The rows, and the names that have none."""
    files = [ROOT / "benchmarks" / "results" / f"{name}-h200.json" for name in NEWEST_FIRST]
    found = [json.loads(file.read_text())["rows"] for file in files if file.exists()]
    made = {name: row_of(name, found) for name in NAMES}
    return [row for row in made.values() if row], [name for name, row in made.items() if not row]


def row_of(name: str, files: list[list[dict[str, Any]]]) -> Row | None:
    """A recurrence's row, out of the files' rows, newest first."""
    sides = [r["sides"] for file in files for r in file if (r["op"], r["shape"]) == (name, OWN.get(name, SHAPE))]
    ours = next((s["ring_la"] for s in sides if "fwd" in s["ring_la"]), None)
    theirs = next((s for s in sides if "fwd" in s.get("fla", {}) and "fwd" in s["ring_la"]), None)
    if ours is None or theirs is None:
        return None
    times = [(side["fwd"], side["fwd_bwd"]) for side in (ours, theirs["fla"])]
    worst = [max(side["errors"].values()) for side in (ours, theirs["fla"])]
    return Row(name, *times, (worst[0], worst[1]), theirs["ring_la"] is ours)


def means(rows: list[Row]) -> tuple[float, float]:
    """Geometric means of fla-core's times over ours."""
    forward, both = zip(*(row.ratios for row in rows))
    return statistics.geometric_mean(forward), statistics.geometric_mean(both)


def lines(rows: list[Row]) -> list[str]:
    """A table in Markdown."""
    out = ["| | ring_la | fla-core | its time over ours | errors |", "|---|---|---|---|---|"]
    for row in rows:
        pairs = [", ".join(f"{x:.3g}" for x in pair) for pair in (row.ours, row.theirs)]
        ratios, errors = ", ".join(f"{x:.2f}" for x in row.ratios), ", ".join(f"{x:.1e}" for x in row.errors)
        out.append(f"| `{row.name}`{row.mark} | {pairs[0]} | {pairs[1]} | {ratios} | {errors} |")
    return out


def main() -> None:
    found, missing = rows()
    print(*lines(found), sep="\n")
    right = [row for row in found if row.right]
    for what, some in (("all", right), ("one run", [row for row in right if row.together])):
        forward, both = means(some)
        print(f"{what}: {len(some)} rows, {forward:.2f} forward, {both:.2f} with backward")
    print("no row:", ", ".join(missing) or "none")


if __name__ == "__main__":
    main()
