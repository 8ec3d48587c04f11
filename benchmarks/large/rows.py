"""Runs of ``ring-la bench large`` one after the other in the same ranks, which share a start and compiled kernels.

    python -m benchmarks.large.rows --gpus 4 --limit 300 --out FOLDER \\
        "hybrid_1b_dsa --length 1048576 --steps 1 --limit 90 --more --run.rehearse 65536" \\
        "hybrid_1b_mla --length 1048576 --steps 1 --limit 60 --more --run.rehearse 65536"

A row is the command line of a run, without --gpus, --out and --folder. Its --limit counts from the end of the row
before, --limit of all from the start. A row that fails or takes longer ends its ranks at once, and those behind it go
on in new ones. FOLDER gets a file a row, NUMBER-SHAPE.json, written after each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from ring_la.cli.options import count

from .. import environment, script, torchrun
from ..training import logged
from . import bench

DONE, FAILED = "done", "failed"
"""Files that say how a row ended: of rank 0, and of any."""
ENDING = 20
"""Seconds that ranks may take to end, behind their last row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW", help="a command line of `ring-la bench large`, in quotes")
    parser.add_argument("--gpus", type=count, default=1, help="ranks to start; on CPUs too")
    parser.add_argument("--limit", type=count, default=600, help="seconds of all rows")
    parser.add_argument("--folder", type=Path, default=Path("runs/large-rows"), help="what the runs leave, below it")
    parser.add_argument("--out", type=Path, help="a folder for the steps of each row as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.rows, args.limit)
        return
    rows = [parsed(words, args.folder / str(n)) for n, words in enumerate(args.rows)]
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for n, row in enumerate(rows):
            row.out = args.out / f"{n}-{row.shape}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ranks are ended, too
    sys.exit(0 if run(rows, args.gpus, args.limit, args.folder / "log.txt") else 1)


def parsed(words: str, folder: Path) -> argparse.Namespace:
    """The options of a row."""
    parser = argparse.ArgumentParser(prog="ROW")
    bench.add_arguments(parser)
    return parser.parse_args(["--folder", str(folder), *shlex.split(words)])


def run(rows: list[argparse.Namespace], gpus: int, limit: float, log: Path) -> bool:
    """All rows, in as many starts of the ranks as it takes; whether all were done."""
    began, at, well = time.monotonic(), 0, True
    while at < len(rows) and (left := limit - (time.monotonic() - began)) > 0:
        ended, good = together(rows[at:], gpus, left, log)
        at, well = at + ended, well and good
    for row in rows[at:]:
        print(f"{row.shape}: not begun, the limit", flush=True)
    return well and at == len(rows)


def together(rows: list[argparse.Namespace], gpus: int, limit: float, log: Path) -> tuple[int, bool]:
    """Ranks that take these rows: how many have ended, of which the last may have failed; and whether all were done."""
    for row in rows:
        shutil.rmtree(bench.folder_of(row), ignore_errors=True)
        bench.folder_of(row).mkdir(parents=True)
    command = torchrun(gpus, "benchmarks.large.rows", "--inside", "--limit", str(int(limit) + 1))
    command += [shlex.join(bench.words(row)) for row in rows]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment(PYTHONUNBUFFERED="1"), start_new_session=True
        )
    first = time.monotonic()
    try:
        for at, row in enumerate(rows):
            outcome = watched(row, process, first + limit)
            print(f"{row.shape}: {outcome}", flush=True)
            if outcome != "exit 0":
                print(log.read_text()[-4000:], flush=True)
                return at + 1, False
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        pass
    finally:
        end(process)
        said = [x for x in log.read_text().splitlines() if x.startswith(("ready after", "left:"))]
        print(*said, sep="\n", flush=True)
    return len(rows), True


def watched(row: argparse.Namespace, process: subprocess.Popen, until: float) -> str:
    """How a row ended, whose steps are kept as they come."""
    began, shown, folder = time.monotonic(), 0, bench.folder_of(row)
    outcome = ""
    while not outcome:
        time.sleep(0.2)
        now, status = time.monotonic(), process.poll()
        if (folder / DONE).exists():
            outcome = "exit 0"
        elif failed := list(folder.glob(f"{FAILED}-*")):
            outcome = failed[0].read_text().strip().splitlines()[-1]
        elif status is not None:
            outcome = f"ranks ended, exit {status}"
        elif now - began > row.limit or now > until:
            outcome = f"stopped after {now - began:.0f} s"
        if outcome or len(logged(folder / "metrics.jsonl")) > shown:
            shown = bench.keep(row, outcome or "under way", shown)
    return outcome


def end(process: subprocess.Popen) -> None:
    """End torchrun and its ranks: ranks that wait for a lost one would take torchrun's 30 s."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ranks = children.read_text().split() if process.poll() is None and children.exists() else []
    for each in (*map(int, ranks), process.pid):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def inside(rows: list[str], limit: int) -> None:
    """On each rank: the rows."""
    train = script.load()
    began = train.Start()
    began.part("imports")
    device = train.join(timedelta(seconds=limit))
    began.part("process group")
    import torch
    import torch.distributed as dist

    for words in rows:
        args = parsed(words, Path())
        folder = bench.folder_of(args)
        try:
            bench.on_rank(args, device, began)
        except BaseException:  # of any kind: the others may wait for this rank
            said = folder / f"{FAILED}-{dist.get_rank()}"
            said.with_name(f"writing-{dist.get_rank()}").write_text(traceback.format_exc())
            os.replace(said.with_name(f"writing-{dist.get_rank()}"), said)
            traceback.print_exc()
            raise
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        if dist.get_rank() == 0:
            if device.type == "cuda":
                free, total = torch.cuda.mem_get_info()
                held = torch.cuda.memory_allocated()
                print(f"left: {held / 2**30:.2f} GiB of tensors, {(total - free) / 2**30:.2f} in all", flush=True)
            (folder / DONE).write_text(json.dumps({"words": words}))
        began = train.Start(time.time())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
