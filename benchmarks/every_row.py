"""The rows that GPUs are for, in one command: `python -m benchmarks.every_row --gpus 4 --budget 560 --out runs/rows`.

A row is a command and the seconds after which it is ended, with all its ranks. Rows go in the order of rows.txt, or of
--only, while the budget lasts; those of one GPU go side by side, a GPU each, before the others. FOLDER gets what a row
writes, what it says as NAME.log, and a line in ended.txt when it has ended. A row that ended well is not run again, so
a run that was cut off goes on where it was. A row whose peer is not installed says so. --list: the rows, and no more.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ring_la.cli.options import count

from . import environment, torchrun

TABLE = Path(__file__).with_name("rows.txt")


class Row(NamedTuple):
    """A command.

    Attributes:
        name: of its files. command: its words; ``{out}`` is the folder. seconds: what it may take.
        alone: it takes one GPU. large: it is a line of ``ring-la bench large``, which starts its ranks itself.
        needs: modules that must be there.
    """

    name: str
    command: str
    seconds: int
    alone: bool = False
    large: bool = False
    needs: tuple[str, ...] = ()


def rows(text: str) -> list[Row]:
    """Those of a table: see `rows.txt`."""
    found: list[Row] = []
    for line in text.partition("\n\n")[2].splitlines():
        if line.startswith(" "):
            found[-1] = found[-1]._replace(command=f"{found[-1].command} {line.strip()}".strip())
            continue
        about, _, needs = line.partition("needs")
        name, seconds, *kinds = about.split()
        found.append(Row(name, "", int(seconds), "one" in kinds, "large" in kinds, tuple(needs.split())))
    return found


def words(row: Row, gpus: int, out: Path) -> list[str]:
    """The command line of a row."""
    said = shlex.split(row.command.format(out=out))
    if row.large:
        more = said.index("--more") if "--more" in said else len(said)
        own = ["--gpus", str(gpus), "--folder", str(out / "runs" / row.name), "--out", str(out / f"{row.name}.json")]
        return [sys.executable, "-m", "ring_la", "bench", "large", *said[:more], *own, *said[more:]]
    return torchrun(1 if row.alone else gpus, *said)


class Run:
    """Rows under way and ended, in one folder.

    Args:
        gpus: how many there are. budget: seconds of all.
    """

    def __init__(self, gpus: int, budget: float, out: Path) -> None:
        self.gpus, self.out, self._until = gpus, out, time.monotonic() + budget
        out.mkdir(parents=True, exist_ok=True)
        self._lines = out / "ended.txt"

    def ended_well(self) -> set[str]:
        """Names of rows that need not run again."""
        lines = self._lines.read_text().splitlines() if self._lines.exists() else []
        return {line.split()[0] for line in lines if " exit 0 " in f"{line} "}

    def side_by_side(self, rows: Sequence[Row]) -> None:
        """Rows of one GPU, as many at a time as there are GPUs."""
        for first in range(0, len(rows), self.gpus):
            some = [(row, self._start(row, gpu)) for gpu, row in enumerate(rows[first : first + self.gpus])]
            for row, (process, began) in some:
                self._end(row, process, began)

    def one_by_one(self, rows: Sequence[Row]) -> None:
        """Rows of all GPUs."""
        for row in rows:
            if self._until - time.monotonic() < min(30, row.seconds):
                self._say(f"{row.name} not begun: the budget")
                continue
            process, began = self._start(row)
            self._end(row, process, began)

    def _start(self, row: Row, gpu: int | None = None) -> tuple[subprocess.Popen, float]:
        own = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        with open(self.out / f"{row.name}.log", "w") as log:
            process = subprocess.Popen(
                words(row, self.gpus, self.out),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(PYTHONUNBUFFERED="1", **own),
            )
        return process, time.monotonic()

    def _end(self, row: Row, process: subprocess.Popen, began: float) -> None:
        """Wait for a row, which has its seconds, and end it with every process it has started."""
        left = min(began + row.seconds, self._until) - time.monotonic()
        try:
            how = f"exit {process.wait(max(0.0, left))}"
        except subprocess.TimeoutExpired:
            how = "cut off"
        _kill(process.pid)
        process.wait()
        self._say(f"{row.name} {how} after {time.monotonic() - began:.0f} s")

    def _say(self, line: str) -> None:
        print(line, flush=True)
        with open(self._lines, "a") as lines:
            print(line, file=lines)


def _kill(process: int) -> None:
    """End a process and all that it has started: torchrun puts each rank into a session of its own."""
    started = [word for file in Path(f"/proc/{process}/task").glob("*/children") for word in file.read_text().split()]
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    for each in started:
        _kill(int(each))


def missing(row: Row) -> list[str]:
    """Modules that a row needs and that are not there."""
    return [name for name in row.needs if importlib.util.find_spec(name) is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {row.name: row for row in rows(TABLE.read_text())}
    parser.add_argument("--gpus", type=count, required=True)
    parser.add_argument("--budget", type=count, default=3600, help="seconds of all rows")
    parser.add_argument("--out", type=Path, default=Path("runs/rows"), help="a folder")
    parser.add_argument(
        "--only", nargs="+", choices=known, default=list(known), metavar="ROW", help="these, in this order"
    )
    parser.add_argument("--list", action="store_true", help="say what would be run")
    args = parser.parse_args()
    run = Run(args.gpus, args.budget, args.out)
    wanted, well = [known[name] for name in args.only], run.ended_well()
    for row in wanted:
        if gone := missing(row):
            print(f"{row.name}: without {', '.join(gone)}", flush=True)
    wanted = [row for row in wanted if row.name not in well and not missing(row)]
    if args.list:
        print(*(f"{row.name}: {shlex.join(words(row, args.gpus, args.out))}" for row in wanted), sep="\n")
        return
    run.side_by_side([row for row in wanted if row.alone])
    run.one_by_one([row for row in wanted if not row.alone])


if __name__ == "__main__":
    main()
