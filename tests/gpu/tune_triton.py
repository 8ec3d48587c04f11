"""Time launch configurations of each kernel: `python -m tests.gpu.tune_triton --what attend,pass --out FILE`.

Each configuration is compiled by a pool of processes first (on a short sequence: no kernel is compiled for a length),
then timed alone in this one. Medians of CUDA events, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch

from ring_la.algebra import Rule
from ring_la.kernels.triton import local, table
from ring_la.kernels.triton.table import Launch
from tests.kernels.triton_cases import Case

PASSES = [(64, 4, 1), (64, 4, 2), (64, 4, 2, 168), (64, 4, 3), (128, 8, 1), (128, 8, 2)]
GRID = {
    "SUMMARISE": [(64, 4, 2), (64, 4, 3), (128, 4, 3), (128, 8, 2), (128, 8, 3)],
    "ATTEND": [(64, 4, 1), (64, 4, 2), (64, 4, 2, 168), (128, 8, 1), (128, 8, 2), (128, 8, 3), (128, 8, 1, 128)],
    "PASS": PASSES,
    "GRADIENT": [(64, 4, 2), (64, 4, 1, 168), (128, 8, 2), (128, 8, 3)],
    "GRADIENT_DIAGONAL": [(32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 8, 1), (64, 8, 2), (32, 4, 2)],
    "INTRA_DIAGONAL": [(64, 4, 1), (32, 4, 1), (64, 4, 2), (32, 4, 2), (64, 8, 1)],
    "WAVES": [132, 264, 528, 1056],
}
PASS = ("SUMMARY", "OUTPUT", "KEEP", "BACK_SUMMARY", "BACKWARD")  # timed apart, so varied together


class Timed(local.TritonRecurrence):
    """Times each launcher's calls."""

    def __init__(self, *args) -> None:
        self.marks: dict[str, list] = {}
        super().__init__(*args)


def instrument() -> None:
    for name in ("_summarise_simple", "_attend", "_prefix", "_forward", "_backward", "_cumulate", "_factors"):
        plain = getattr(local.TritonRecurrence, name)

        def timed(self, *args, _plain=plain, _name=name, **kw):
            if _name in ("_forward", "_backward"):
                _ = self.intra
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            out = _plain(self, *args, **kw)
            b.record()
            tag = "".join(f" {k}" for k in ("summary", "keep", "reverse", "transposed", "dots") if kw.get(k))
            tag += " o" if kw.get("o") is not None else ""
            self.marks.setdefault(_name + tag, []).append((a, b))
            return out

        setattr(Timed, name, timed)


def parts(rule: str, shape: tuple[int, ...], dtype=torch.bfloat16, reps: int = 6) -> dict[str, float]:
    """Median ms of each launch of one forward and backward, and of the whole, by name."""
    B, T, H, D = shape
    case = Case(rule, B, T, H, H, D, D, dtype, decay=0.1)
    x = case.inputs("cuda")
    do = torch.randn_like(x.v)
    times: dict[str, list[float]] = {}
    for _ in range(reps):
        run = Timed(Rule.parse(rule), x, None, D**-0.5)
        ev = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        ev[0].record()
        if not run.simple:
            _ = run.intra
        ev[1].record()
        run.output(None)
        ev[2].record()
        run.gradients(None, do, None)
        ev[3].record()
        torch.cuda.synchronize()
        for name, pairs in run.marks.items():
            times.setdefault(name, []).append(sum(a.elapsed_time(b) for a, b in pairs))
        for name, i in (("=intra", 0), ("=output", 1), ("=gradients", 2)):
            times.setdefault(name, []).append(ev[i].elapsed_time(ev[i + 1]))
    return {n: round(sorted(t)[len(t) // 2], 4) for n, t in times.items()}


def settings(what: list[str]) -> list[tuple[str, Launch | int]]:
    return [(name, Launch(*entry) if isinstance(entry, tuple) else entry) for name in what for entry in GRID[name]]


def apply(name: str, launch: Launch | int, D: int) -> None:
    if name == "WAVES":
        table.WAVES.update(additive=launch, delta=launch)
    for one in PASS if name == "PASS" else (name,):
        if name != "WAVES":
            getattr(table, one)[D] = launch


def rules_of(name: str) -> list[str]:
    return {
        "SUMMARISE": ["additive_scalar"], "ATTEND": ["additive_scalar", "additive_none"],
        "PASS": ["delta_scalar", "delta_diagonal", "additive_diagonal"], "GRADIENT": ["delta_scalar"],
        "GRADIENT_DIAGONAL": ["delta_diagonal", "additive_diagonal"], "INTRA_DIAGONAL": ["additive_diagonal",
        "delta_diagonal"],
        "WAVES": ["additive_scalar", "delta_scalar", "delta_diagonal", "additive_diagonal"],
    }[name]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default=",".join(GRID))
    parser.add_argument("--D", type=int, default=128)
    parser.add_argument("--chunks", default="64")
    parser.add_argument("--shapes", default="1x32768x32")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--part", type=int)
    parser.add_argument("--budget", type=float, default=200)
    parser.add_argument("--out")
    args = parser.parse_args()
    instrument()
    todo = [
        (int(c), name, launch, rule)
        for c in args.chunks.split(",")
        for name, launch in settings(args.what.split(","))
        for rule in rules_of(name)
    ]
    shapes = [(*map(int, s.split("x")), args.D) for s in args.shapes.split(",")]
    start, rows = time.time(), []
    if args.part is None:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        pool = [subprocess.Popen([sys.executable, "-m", "tests.gpu.tune_triton", *sys.argv[1:], "--part", str(i)],
        env=env)
                for i in range(args.jobs)]  # fmt: skip
        for p in pool:
            p.wait()
        print("compiled", round(time.time() - start, 1), "s")
    for i, (chunk, name, launch, rule) in enumerate(todo):
        if args.part is not None and i % args.jobs != args.part:
            continue
        kept = {n: dict(getattr(table, n)) for n in (*PASS, *GRID) if n != "PASS"}
        apply(name, launch, args.D)
        local.CHUNK = chunk
        for shape in [(1, 512, shapes[0][2], args.D)] if args.part is not None else shapes:
            if args.part is None and time.time() - start > args.budget:
                break
            try:
                times = parts(rule, shape, reps=1 if args.part is not None else 6)
            except Exception as e:
                times = {"failed": f"{type(e).__name__}: {str(e)[-160:]}"}
            rows.append(dict(chunk=chunk, table=name, launch=str(launch), rule=rule, shape=shape, times=times))
            if args.part is None:
                label = (
                    launch if isinstance(launch, int) else (launch.block, launch.warps, launch.stages, launch.registers)
                )
                print(name, label, rule, shape[1:3], *(f"{k}:{v}" for k, v in times.items()), flush=True)
        for n, entries in kept.items():
            getattr(table, n).update(entries)
    if args.out and args.part is None:
        json.dump(rows, open(args.out, "w"), indent=1)


if __name__ == "__main__":
    main()
