"""All rows of whole steps in one command: `python -m benchmarks.steps_table --gpus 1 --budget 600 --out runs/steps`.

Each row is a run of `benchmarks.steps` under torchrun with a file of its own, FOLDER/steps-NAME-GPUS.json; rows whose
file is there are not run again, so a run that was cut off goes on where it ended. Rows in order, while --budget seconds
last; then the table: milliseconds eager, captured, compiled, and each beside the sum of its kernels' times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import torchrun


class StepRow(NamedTuple):
    """A run: its name, what `benchmarks.steps` is told, and seconds after which it begins no further way."""

    name: str
    options: str
    seconds: int = 60


ROWS = (
    StepRow("flux-1024", "--case flux --size 1024x1024", 90),
    StepRow("flux-2048", "--case flux --size 2048x2048", 90),
    StepRow("decode-1", "--case decode --sequences 1", 30),
    StepRow("decode-8", "--case decode --sequences 8", 30),
    StepRow("decode-64", "--case decode --sequences 64", 30),
    StepRow("small-4096", "--case small --tokens 4096", 30),
    StepRow("small-32768", "--case small --tokens 32768", 30),
    StepRow("hybrid_1b-4096", "--case hybrid_1b --tokens 4096", 45),
    StepRow("hybrid_1b-32768", "--case hybrid_1b --tokens 32768"),
    StepRow("qwen3_next-4096", "--case qwen3_next --tokens 4096", 45),
    StepRow("qwen3_next-32768", "--case qwen3_next --tokens 32768"),
    StepRow("wan-480p", "--case wan --size 21x480x832 --layers 4"),
)
STARTING = 40
"""Seconds a row may take beyond its own: processes, the model, the way that is under way."""
WAYS = "eager", "captured", "compiled", "compiled, captured"


def run(row: StepRow, gpus: int, out: Path, seconds: float) -> None:
    """Take a row, for so many seconds at most."""
    what = ["benchmarks.steps", *row.options.split(), "--limit", str(row.seconds), "--out", str(out)]
    try:
        subprocess.run(torchrun(gpus, *what), timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"{row.name}: cut off after {seconds:.0f} s; what was measured by then counts", flush=True)


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table: milliseconds, and times the sum of its kernels (older files: of what was captured)."""
    cells = []
    for way in WAYS:
        older = found.get("kernels of compiled" if "compiled" in way else "kernels of eager")
        kernels = found.get(f"kernels of {way}", older)
        ms = found.get(way)
        if not isinstance(ms, float):
            cells.append("–" if ms is None else "refused")
        else:
            cells.append(f"{ms:g}" + (f" ({ms / kernels:.3f})" if kernels else ""))
    return f"| {name} | {' | '.join(cells)} |"


def table(folder: Path, rows: Sequence[StepRow], gpus: int) -> str:
    """What is there."""
    lines = [f"| {gpus} GPUs, ms (times its kernels) | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    for row in rows:
        file = file_of(folder, row, gpus)
        if file.exists():
            lines.append(line(row.name, json.loads(file.read_text())))
    return "\n".join(lines)


def file_of(folder: Path, row: StepRow, gpus: int) -> Path:
    """Where a row's figures are."""
    return folder / f"steps-{row.name}-{gpus}.json"


def main() -> None:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--budget", type=float, default=900, help="seconds for all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [row for row in ROWS if row.name in args.rows]
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    for row in rows:
        left = end - time.monotonic()
        if left > STARTING and not file_of(args.out, row, args.gpus).exists():
            run(row, args.gpus, file_of(args.out, row, args.gpus), min(left, row.seconds + STARTING))
    print(table(args.out, rows, args.gpus))


if __name__ == "__main__":
    main()
