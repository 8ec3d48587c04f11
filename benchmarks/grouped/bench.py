"""Grouped GEMM on one GPU: correctness against fp64, then times beside the other ways to do it, in one run.

    ring-la bench grouped [--tune] [--out runs/bench_grouped]

Products: "rows" (the forward product), "rows_t" (the gradient of A: B by columns), "outer" (the gradient of B), and
"train" (forward and both gradients through autograd). Peers are called as bare as they come: "loop" knows the sizes
on the host, "torch" has its offsets ready. "dense" is one matmul of the same FLOPs. Writes a table, JSON and PNG.

``--tune`` first times the tile candidates of kernels/grouped/tuning.py, prints the table to paste there, and uses
it for the rest of the run.
"""

from __future__ import annotations

import argparse
import pathlib

import torch

from ring_la.cli.options import count
from ring_la.errors import UnsupportedError
from ring_la.kernels.grouped import choose

from ..peers.grouped import contenders, training
from ..rows import machine, save
from .checks import check_all, check_training
from .products import KINDS, call_of, group_sizes, operands, times
from .report import picture, report
from .tuning import probe, tune

GROUPS = (8, 64, 256)


def measure(rows: int, k: int, n: int) -> list[dict]:
    lines = []
    for groups in GROUPS:
        a, b, dc = operands(rows, groups, k, n, torch.bfloat16)
        for distribution in ("balanced", "zipf"):
            sizes = group_sizes(distribution, rows, groups)
            device_sizes = torch.tensor(sizes, device="cuda")
            for kind in (*KINDS, "train"):
                if kind == "train":
                    functions, chosen = training(a, b, dc, sizes, device_sizes), ""
                else:
                    call = call_of(kind, a, b, dc, device_sizes)
                    functions, chosen = contenders(kind, call), choose("auto", call)
                ms = times(functions)
                flops = 2 * rows * k * n * (3 if kind == "train" else 1)
                others = {name: t for name, t in ms.items() if name in ("loop", "torch", "cutlass")}
                line = {"kind": kind, "G": groups, "sizes": distribution, "ms": ms, "auto is": chosen}
                line["tflops"] = {name: flops / t / 1e9 for name, t in ms.items()}
                line["of best other"] = min(others.values()) / ms["auto"]
                line["of dense"] = ms["dense"] / ms["auto"]
                lines.append(line)
        del a, b, dc
        torch.cuda.empty_cache()
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench_grouped"))
    parser.add_argument("--tune", action="store_true", help="time the tile candidates first and use the fastest")
    parser.add_argument("--rows", type=count, default=32768)
    parser.add_argument("--k", type=count, default=2048)
    parser.add_argument("--n", type=count, default=4096)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UnsupportedError("device", "a CUDA device", "none")
    torch.manual_seed(0)
    if options.probe:
        probe()
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    device = "{device}, torch {torch}".format(**machine())
    title = f"Grouped GEMM, {options.rows} × {options.k} by G × {options.k} × {options.n}, bf16, {device}"
    print(title)
    result: dict = {"title": title, "tuning": tune(options.k, options.n) if options.tune else []}
    file = options.out / "grouped.json"
    result["checks"] = check_all() + check_training()
    save(file, result)
    wrong = [line for line in result["checks"] if not line.get("ok", True)]
    print(f"{sum('ok' in line for line in result['checks'])} checks, {len(wrong)} wrong", *wrong, sep="\n")
    result["times"] = measure(options.rows, options.k, options.n)
    save(file, result)
    report(result["times"])
    picture(result["times"], options.out / "grouped.png", title)
    return 1 if wrong else 0
