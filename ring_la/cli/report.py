"""One HTML file that shows a run: losses, speed, memory, who holds which tokens, and a step by rank.

    ring-la report runs/hybrid                            a run of examples/train_hybrid.py
    ring-la report runs/demo                              what launch/demo.sh leaves: its losses
    ring-la report bench_scan.json --out scan.html        what a benchmark wrote: times side by side

A run of `train_hybrid.py --run.profile 1` also has a timeline: when each rank computes, when it exchanges, and how much
of that is not hidden. The file holds all it shows: no script, nothing fetched.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..reporting import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a training run's folder, or a benchmark's JSON")
    parser.add_argument("--out", type=Path, help="the HTML file (default: report.html beside what is read)")


def run(args: argparse.Namespace) -> None:
    print(write(args.run, args.out))
