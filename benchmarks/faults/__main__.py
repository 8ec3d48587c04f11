"""``python -m benchmarks.faults --out FILE``: every fault at every moment, and a restart on the same port."""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ring_la.testing.processes import free_port

from ..rows import save
from . import disks, job, servers
from .moments import FAULTS, MOMENTS, ON_GPUS, recurrence_backward

FOLDERS = ("/dev/shm", tempfile.gettempdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="moments or parts whose name holds one of these words, by commas")
    parser.add_argument("--faults", default=",".join(FAULTS), help="of these, by commas")
    parser.add_argument(
        "--ranks", type=int, default=3, help="on GPUs, which they share where there are fewer; without any on CPUs"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="so many jobs side by side; what is left behind is then one list of all"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    before, free = left_behind(), free_memory()
    for one in found(options.only.split(","), options.faults.split(","), options.ranks, options.at_once):
        rows.append(one)
        print(row(one), flush=True)
        if options.out:
            write(options.out, rows, options.ranks)
    left = sorted(left_behind() - before) + held(free)
    print(f"left behind by all: {', '.join(left) or 'nothing'}", flush=True)
    if options.out:
        write(options.out, rows, options.ranks, left)


def found(only: list[str], faults: list[str], ranks: int, at_once: int = 1) -> Iterator[dict[str, Any]]:
    """A row for every fault at every moment, as they end."""
    moments = MOMENTS | (ON_GPUS if torch.cuda.is_available() else {})
    asked = [
        (name, fault, moment, ranks, at_once == 1)
        for name, moment in moments.items()
        for fault in faults
        if any(word in name for word in only)
    ]
    with concurrent.futures.ThreadPoolExecutor(at_once) as jobs:
        for done in concurrent.futures.as_completed([jobs.submit(told, *one) for one in asked]):
            yield done.result()
    for part in (servers, disks):
        if any(word in part.__name__ for word in only):
            yield from part.rows()


def write(file: Path, rows: list[dict[str, Any]], ranks: int, left: list[str] | None = None) -> None:
    about = {
        "command": "python -m benchmarks.faults", "torch": torch.__version__, "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores", "load": round(os.getloadavg()[0], 1),
        "backend": "nccl" if torch.cuda.is_available() else "gloo", "gpus": torch.cuda.device_count(),
        "timeout": job.TIMEOUT, "ranks": ranks, "rows": rows, "left behind by all": left,
    }  # fmt: skip
    save(file, about)


def told(name: str, fault: str, moment, ranks: int, alone: bool = True) -> dict[str, Any]:
    """A fault at a moment, then a sound job on the same port; beside others nobody can say what this one leaves."""
    before, free = left_behind(), free_memory()
    try:
        said, port = job.run(moment, fault, ranks)
    except RuntimeError as error:
        said, port = [job.Said(0, "not measured", str(error).splitlines()[0], 0.0)], free_port()
    start = time.monotonic()
    again, _ = job.run(recurrence_backward, "none", ranks, port)
    sound = all(s.error == "nothing raised" for s in again)
    return {
        "moment": name, "fault": fault, "said": [s._asdict() for s in said],
        "restart": f"{time.monotonic() - start:.1f} s" if sound else str(again),
        "left behind": sorted(left_behind() - before) + held(free) if alone else None,
    }  # fmt: skip


def left_behind() -> set[str]:
    """Files of ring_la's and of torch's store and shared memory among temporary ones."""
    ours = re.compile(r"ring_la-|torch_|torch-")
    return {f"{d}/{name}" for d in FOLDERS for name in os.listdir(d) if ours.match(name)}


def free_memory() -> list[int]:
    """MiB of each GPU; its context in this process is made by the first call."""
    return [torch.cuda.mem_get_info(i)[0] >> 20 for i in range(torch.cuda.device_count())]


def held(before: list[int]) -> list[str]:
    """GPUs with less memory free than before."""
    found = zip(before, free_memory())
    return [f"GPU {i}: {a - b} MiB" for i, (a, b) in enumerate(found) if a - b > 64]


def row(one: dict[str, Any]) -> str:
    """A line of the table."""
    said = one["said"]
    errors = sorted({s["error"] for s in said})
    seconds = max((s["seconds"] for s in said), default=0.0)
    left = "–" if one["left behind"] is None else ", ".join(one["left behind"]) or "nothing"
    more = f"{left} | {one['restart']}"
    return f"| {one['moment']} | {one['fault']} | {', '.join(errors)} | {seconds:.1f} | {more} |"


if __name__ == "__main__":
    main()
