"""Time launch configurations of each kernel: `python -m benchmarks.tuning.triton --what ATTEND,GRADIENT --out FILE`.

Each configuration is compiled by a pool of processes first (on a short sequence: no kernel is compiled for a length),
then timed alone in this one, launch by launch. Medians of CUDA events, in ms. Its results are checked against the fp64
token loop at head sizes 64 and 128: what the compiler gets wrong depends on the configuration.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from benchmarks.options import need_gpus
from benchmarks.rows import save
from ring_la.algebra import Rule
from ring_la.kernels.families import recurrence
from ring_la.kernels.protocol import Backward, OutputUse
from ring_la.kernels.runtime.launch import launch as plain
from ring_la.kernels.spans import table
from ring_la.kernels.spans.table import Tiling
from tests.support.launches import launched_by
from tests.support.triton_cases import Case, errors

PASSES = [(64, 4, 1), (64, 4, 1, 168), (64, 4, 2), (64, 4, 2, 168), (128, 8, 1), (128, 8, 2)]
ROWS = [(64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 2)]
GRADIENTS = [(32, 4, 1), (32, 4, 2), (32, 4, 3), (32, 8, 2)]
GRID = {
    "SUMMARISE": [(64, 4, 2), (64, 4, 3), (128, 4, 3), (128, 8, 2), (128, 8, 3)],
    "ATTEND": [(64, 4, 1), (64, 4, 2), (128, 8, 2), (128, 8, 3), (128, 8, 4)],
    "ATTEND_GATED": [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3)],
    "WRITES": [(128, 8, 2), (128, 8, 3)],
    "STATES": [(64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 3)],
    "ADDITIVE_GRADIENT": [(32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 8, 2)],
    "SUMMARY": PASSES, "OUTPUT": PASSES, "KEEP": PASSES, "BACK_SUMMARY": PASSES, "BACKWARD": PASSES,
    "PAIRS": [(64, 4, 1), (64, 4, 2), (128, 4, 1), (64, 4, 2, 168)],
    "GRADIENT": ROWS,
    "GRADIENT_DIAGONAL": GRADIENTS, "DPLR_GRADIENT": [(32, 4, 1), (32, 8, 1), (64, 8, 1)],
    "PRODUCTS": [(64, 4, 1), (64, 4, 2), (128, 4, 1), (128, 4, 1, 128)],
    "PRODUCTS_DIAGONAL": [(32, 4, 1), (32, 4, 2), (64, 4, 1), (64, 4, 2), (32, 4, 1, 168)],
    "WAVES": [132, 264, 528, 1056],
}  # fmt: skip
DELTA, DIAGONAL = ["delta_none", "delta_scalar"], ["delta_diagonal", "additive_diagonal"]
RULES = {
    "SUMMARISE": ["additive_none", "additive_scalar"], "ATTEND": ["additive_none"],
    "ATTEND_GATED": ["additive_scalar"], "WRITES": ["additive_none", "additive_scalar"],
    "STATES": ["additive_scalar"], "ADDITIVE_GRADIENT": ["additive_scalar"],
    "GRADIENT": DELTA, "PRODUCTS": DELTA,
    "PAIRS": ["dplr_diagonal"], "DPLR_GRADIENT": ["dplr_diagonal"],
    "GRADIENT_DIAGONAL": DIAGONAL, "PRODUCTS_DIAGONAL": DIAGONAL,
}  # fmt: skip
PASSED = [*DELTA, *DIAGONAL]
FLAGS = ("SUMMARY", "KEEP", "OUT", "REVERSE", "TRANSPOSED", "LEVELLED")


def marked(marks: dict[str, list]) -> AbstractContextManager[None]:
    """Events around every launch, by kernel and what it does."""

    def timed(kernel, grid, *args, **constants):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        plain(kernel, grid, *args, **constants)
        b.record()
        name = kernel.__name__.removesuffix("_kernel")
        marks.setdefault(" ".join([name, *(f.lower() for f in FLAGS if constants.get(f))]), []).append((a, b))

    return launched_by(timed)


def both(rule: Rule, x, do: torch.Tensor, gate: bool, between: torch.cuda.Event | None = None) -> None:
    """One forward and one backward, as an eager call runs them."""
    scale = x.q.shape[-1] ** -0.5
    saved = recurrence(rule, x, None, scale, OutputUse(saved=True)).output(None).saved
    if between is not None:
        between.record()
    recurrence(rule, x, None, scale).gradients(Backward(None, do, saved, gate), None)


def times(name: str, shape: tuple[int, ...], reps: int, gate: bool = True) -> dict[str, float]:
    """Median ms of forward, of forward and backward (issued ahead of the GPU), and of each launch."""
    B, T, H, D = shape
    rule = Rule.parse(name)
    x = Case(name, B, T, H, H, D, D, torch.bfloat16, decay=0.1).inputs("cuda")
    do = torch.randn_like(x.v)
    found: dict[str, list[float]] = {}
    for _ in range(reps):
        marks: dict[str, list] = {}
        with marked(marks):
            both(rule, x, do, gate)
        torch.cuda.synchronize()
        for launch, pairs in marks.items():
            found.setdefault(launch, []).append(sum(a.elapsed_time(b) for a, b in pairs))
        ev = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(2_000_000)
        ev[0].record()
        both(rule, x, do, gate, ev[1])
        ev[2].record()
        torch.cuda.synchronize()
        for what, last in (("=forward", ev[1]), ("=both", ev[2])):
            found.setdefault(what, []).append(ev[0].elapsed_time(last))
    return {n: round(statistics.median(t), 4) for n, t in sorted(found.items())}


@contextmanager
def applied(name: str, launch: Tiling | int | None) -> Iterator[None]:
    """One table's entries for head sizes up to 128 replaced."""
    entries = getattr(table, name or "WAVES")
    kept = dict(entries)
    if isinstance(launch, int):
        entries.update(additive=launch, delta=launch)
    elif launch is not None:
        entries.update({k: launch for k in entries if k not in (256,) and (not isinstance(k, tuple) or k[1] < 256)})
    try:
        yield
    finally:
        entries.clear()
        entries.update(kept)


def worst(name: str) -> list[float]:
    """The largest error of anything the rule computes, at head sizes 64 and 128."""
    cases = [Case(name, 1, 300, 4, 4, D, D, torch.bfloat16, states=False) for D in (64, 128)]
    return [float(f"{max(errors(c, recurrence, 'cuda').values()):.1e}") for c in cases]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default=",".join(["", *GRID]), help="tables; an empty name: as they are")
    parser.add_argument("--rules", default="additive_none,additive_scalar,additive_diagonal,delta_none,delta_scalar,"
                        "delta_diagonal,dplr_diagonal", help="what is timed, as far as a table serves it")  # fmt: skip
    parser.add_argument("--shapes", default="1x32768x32x128")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--part", type=int)
    parser.add_argument("--budget", type=float, default=200, help="seconds after which nothing is started")
    parser.add_argument("--out")
    args = parser.parse_args()
    need_gpus(parser)
    todo = []
    for what in args.what.split(","):
        for entry in GRID.get(what, [None]):
            launch = Tiling(*entry) if isinstance(entry, tuple) else entry
            for rule in [r for r in RULES.get(what, PASSED if what else args.rules.split(",")) if r in args.rules]:
                todo += [(what, launch, rule, tuple(map(int, s.split("x")))) for s in args.shapes.split(",")]
    if args.part is not None:
        for what, launch, rule, shape in todo[args.part :: args.jobs]:
            with applied(what, launch):
                times(rule, (shape[0], 512, *shape[2:]), 1)
        return
    start, rows = time.time(), []
    command = [sys.executable, "-m", "benchmarks.tuning.triton", *sys.argv[1:], "--part"]
    pool = [subprocess.Popen([*command, str(i)], env=os.environ | {"OMP_NUM_THREADS": "1"}) for i in range(args.jobs)]
    for p in pool:
        p.wait()
    print("compiled", round(time.time() - start, 1), "s", flush=True)
    for what, launch, rule, shape in todo:
        if time.time() - start > args.budget:
            break
        torch.manual_seed(0)
        try:
            with applied(what, launch):
                found = {"times": times(rule, shape, 7), "errors": worst(rule) if launch else []}
        except Exception as e:  # the rest of the table is still wanted
            found = {"failed": f"{type(e).__name__}: {str(e)[-160:]}"}
        rows.append(dict(table=what, launch=str(launch), rule=rule, shape=shape) | found)
        print(what, launch, rule, shape, found, flush=True)
        save(args.out, rows)


if __name__ == "__main__":
    main()
