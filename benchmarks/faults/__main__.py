"""``python -m benchmarks.faults --out FILE``: every fault at every moment, and a restart on the same port."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import disks, job, servers
from .moments import FAULTS, MOMENTS, ON_GPUS, recurrence_backward

FOLDERS = ("/dev/shm", tempfile.gettempdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="moments or parts whose name holds this")
    options = parser.parse_args()
    gpus = torch.cuda.device_count() >= 3
    rows: list[dict[str, Any]] = []
    moments = MOMENTS | (ON_GPUS if gpus else {})
    for name, moment in moments.items():
        for fault in FAULTS:
            if options.only in name:
                rows.append(told(name, fault, moment))
                print(row(rows[-1]), flush=True)
    for part in (servers.rows, disks.rows):
        if options.only in part.__module__:
            for one in part():
                rows.append(one)
                print(row(one), flush=True)
    if options.out:
        about = {
            "command": "python -m benchmarks.faults", "torch": torch.__version__, "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores", "load": os.getloadavg()[0],
            "backend": "nccl" if gpus else "gloo", "timeout": job.TIMEOUT, "ranks": 3, "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(about, indent=1) + "\n")


def told(name: str, fault: str, moment) -> dict[str, Any]:
    """A fault at a moment, then a sound job on the same port."""
    before = left_behind()
    said, port = job.run(moment, fault)
    start = time.monotonic()
    again, _ = job.run(recurrence_backward, "none", port=port)
    sound = all(s.error == "nothing raised" for s in again)
    return {
        "moment": name, "fault": fault, "said": [s._asdict() for s in said],
        "restart": f"{time.monotonic() - start:.1f} s" if sound else str(again),
        "left behind": sorted(left_behind() - before),
    }  # fmt: skip


def left_behind() -> set[str]:
    """Files of ring_la's and of torch's store and shared memory among temporary ones."""
    ours = re.compile(r"ring_la-|torch_|torch-")
    return {f"{d}/{name}" for d in FOLDERS for name in os.listdir(d) if ours.match(name)}


def row(one: dict[str, Any]) -> str:
    """A line of the table."""
    said = one["said"]
    errors = sorted({s["error"] for s in said})
    seconds = max((s["seconds"] for s in said), default=0.0)
    more = f"{', '.join(one['left behind']) or 'nothing'} | {one['restart']}"
    return f"| {one['moment']} | {one['fault']} | {', '.join(errors)} | {seconds:.1f} | {more} |"


if __name__ == "__main__":
    main()
