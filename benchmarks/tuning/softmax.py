"""Time launch settings of the softmax kernels: `python -m benchmarks.tuning.softmax --jobs 14 --out FILE.json`.

Every setting is compiled by a pool of processes first (on a short sequence: no kernel is compiled for a length), then
timed alone in this one, causal in bf16. Medians of CUDA events, ms; prints the fastest of each kernel and width.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.options import need_gpus
from benchmarks.rows import machine, save
from benchmarks.timing import median
from ring_la.softmax.backends import BACKENDS
from ring_la.softmax.backends.triton import kernels, launch, table
from ring_la.softmax.backends.triton.table import TileSettings as Tiling
from ring_la.softmax.geometry import Pair, Tokens
from ring_la.softmax.merging import Partial, row_sums
from ring_la.softmax.scores import Scores

NARROW = [
    Tiling(128, 64, 4, 2), Tiling(128, 64, 4, 3), Tiling(128, 64, 4, 4), Tiling(128, 128, 8, 2), Tiling(128, 128, 8, 3),
    Tiling(64, 64, 4, 3), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 3), Tiling(64, 128, 4, 2), Tiling(64, 64, 4, 2),
]  # fmt: skip
WIDE = [
    Tiling(64, 32, 8, 2), Tiling(64, 32, 4, 2), Tiling(64, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(128, 64, 8, 2),
    Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(64, 64, 8, 1), Tiling(32, 64, 8, 2),
]  # fmt: skip
GRID = {64: NARROW, 128: NARROW, 256: WIDE}
TABLES = ("FORWARD", "BACKWARD_KEYS", "BACKWARD_QUERIES")


def calls(width: int, T: int, H: int) -> dict[str, Callable[[], None]]:
    """A call of each kernel on random causal inputs."""
    device = torch.device("cuda")
    q, k, v, do = (torch.randn(1, T, H, width, device=device, dtype=torch.bfloat16) for _ in range(4))
    rows, scores = Tokens.whole(T, device), Scores(width**-0.5, right=0)
    out = Partial(q.shape, q.dtype, device)
    pair = Pair(rows, rows, scores.reach)
    BACKENDS["triton"].forward(q, k, v, scores, pair, out)
    o, lse = out.result()
    inputs = (q, k, v, do, lse, row_sums(do, o, None))
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    call = launch.General(scores, pair, q, k, v, do)
    return {
        "FORWARD": lambda: call.over_queries(kernels.forward, table.FORWARD, q, k, v, o, lse),
        "BACKWARD_KEYS": lambda: call.over_keys(kernels.backward_keys, table.BACKWARD_KEYS, *inputs, dk, dv, dk),
        "BACKWARD_QUERIES": lambda: call.over_queries(
            kernels.backward_queries, table.BACKWARD_QUERIES, *inputs, dq, dq
        ),
    }


def sweep(T: int, H: int, part: int, parts: int, reps: int) -> dict[str, dict[str, float]]:
    """ms of each setting of this part, by kernel and width."""
    out: dict[str, dict[str, float]] = {}
    number = 0
    for width, settings in GRID.items():
        by_name = calls(width, T, H)
        for name in TABLES:
            default = getattr(table, name)[width]
            for how in settings:
                number += 1
                if number % parts != part:
                    continue
                getattr(table, name)[width] = how
                try:
                    ms = median(by_name[name], reps)
                except Exception as error:  # too much shared memory, or what the compiler cannot do
                    ms = float("inf")
                    print(f"{name} {width} {tuple(how)}: {type(error).__name__}", flush=True)
                out.setdefault(f"{name} {width}", {})[str(tuple(how))] = ms
            getattr(table, name)[width] = default
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--compile", type=int, help="compile this part of the settings only")
    parser.add_argument("--out")
    args = parser.parse_args()
    need_gpus(parser)
    if args.compile is not None:
        sweep(256, args.heads, args.compile, args.jobs, 1)
        return
    start, command = time.time(), [sys.executable, "-m", "benchmarks.tuning.softmax", "--jobs", str(args.jobs)]
    workers = [
        subprocess.Popen([*command, "--heads", str(args.heads), "--compile", str(i)], stdout=subprocess.DEVNULL)
        for i in range(args.jobs)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    times = sweep(args.tokens, args.heads, 0, 1, 5)
    save(args.out, machine() | dict(tokens=args.tokens, heads=args.heads, ms=times))
    for name, by in times.items():
        best = sorted(by, key=by.get)[:4]
        print(f"{name:22} " + "   ".join(f"{how} {by[how]:.3f}" for how in best), flush=True)


if __name__ == "__main__":
    main()
