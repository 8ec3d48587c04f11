"""A step eager, compiled and captured, beside the sum of its kernels' times.

    torchrun --nproc-per-node 2 -m benchmarks.steps --case small --tokens 4096 --limit 60 --out steps.json

Cases: `small` and `hybrid_1b`, forward and backward of a HybridLM of examples/configs (bf16, no recomputation, no
optimizer) on this rank's tokens of a sequence of `tokens` a rank; `qwen3_next`, the same of four of its layers through
Transformers; `decode`, a token of each of --sequences of `hybrid_1b`; `flux` and `wan`, a denoising step of Diffusers'
transformers at --size (1024x1024, 21x480x832: frames of latents first), whole inputs on every rank. Medians over the
ranks' slowest, as many calls as fit in --seconds and 20 at most. The sum of kernels is what the profiler gives of that
way's step, exchanges among them, so a step may be shorter where two run side by side. --limit: seconds after which no
further way is begun. --ways also takes "reduce-overhead", PyTorch's own graphs. A "+" among the options begins another
run in the same processes, which start once; a run that fails ends alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import ring_la
from benchmarks.options import join_gpus, need_gpus

from .rows import machine, save
from .step_cases import StepCase, decoding, denoising, qwen3_next, training
from .timing import kernels, largest, wall

WARM, MOST = 6, 20
"""Calls before the clock starts; calls of a median."""


def median(run: Callable[[], object], seconds: float) -> float:
    """Milliseconds of a call, the slowest rank's, of as many as fit in so many seconds."""
    times: list[float] = []
    while len(times) < MOST and (len(times) < 3 or largest([sum(times)])[0] < seconds):
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        times.append(wall(run))
    return 1e3 * statistics.median(largest(times))


def case_of(options: argparse.Namespace, cp: ring_la.ContextParallel | None) -> StepCase:
    """The step that is measured."""
    if options.case == "qwen3_next":
        return qwen3_next(options.tokens, cp)
    if options.case == "decode":
        return decoding("hybrid_1b", options.layers, options.sequences, cp)
    if options.case in ("flux", "wan"):
        return denoising(options.case, options.size, options.layers, cp, torch.device("cuda"))
    return training(options.case, options.layers, options.tokens, cp)


def ways_of(case: StepCase, cp: ring_la.ContextParallel | None) -> dict[str, Callable[[], Callable]]:
    """What makes a step, by way."""

    def compiled(**how: str) -> Callable:
        return case.step(torch.compile(case.function, fullgraph=True, **how))

    return {
        "eager": lambda: case.step(case.function),
        "captured": lambda: ring_la.capture(case.step(case.function), cp),
        "compiled": compiled,
        "compiled, captured": lambda: ring_la.capture(compiled(), cp),
        "reduce-overhead": lambda: graph_trees(case, compiled),
    }


def graph_trees(case: StepCase, compiled: Callable[..., Callable]) -> Callable:
    """A step of PyTorch's graph trees, after an eager one: what ours keeps for later calls must not lie in a graph."""
    case.step(case.function)(*case.arguments)
    return compiled(mode="reduce-overhead")


def measure(options: argparse.Namespace) -> None:
    """Print and write milliseconds by way, or why there are none."""
    began = time.monotonic()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    cp = ring_la.ContextParallel() if dist.is_initialized() and (ranks > 1 or options.case == "qwen3_next") else None
    torch.manual_seed(0)
    case = case_of(options, cp)
    found: dict[str, object] = {n: getattr(options, n) for n in ("case", "layers", "tokens", "sequences", "size")}
    found |= {"ranks": ranks} | machine()
    for name, make in ways_of(case, cp).items():
        if name not in options.ways:
            continue
        try:
            if largest([time.monotonic() - began])[0] > options.limit:
                raise TimeoutError(f"not begun within {options.limit:.0f} s")
            step = make()
            run = functools.partial(step, *case.arguments)
            found[f"{name}, first calls, s"] = round(WARM * wall(run, WARM), 1)
            found[name] = round(median(run, options.seconds), 3)
            each = kernels(run, calls=3)
            found[f"kernels of {name}"] = round(sum(us for *_, us in each) / 1e3, 3)
            if options.table:
                longest = [(kernel, count, round(us, 1)) for kernel, count, us in each[: options.table]]
                found[f"longest kernels of {name}"] = longest
        except Exception as error:  # a way that fails is a result, and the others are measured
            found[name] = f"{type(error).__name__}: {error}"[:600]
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(found), flush=True)
            save(options.out, found)


def parted(words: Sequence[str]) -> list[list[str]]:
    """The options of each run.

    >>> parted(["--case", "small", "+", "--case", "wan"])
    [['--case', 'small'], ['--case', 'wan']]
    """
    runs: list[list[str]] = [[]]
    for word in words:
        if word == "+":
            runs.append([])
        else:
            runs[-1].append(word)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case",
        "--config",
        dest="case",
        default="small",
        choices=["small", "hybrid_1b", "qwen3_next", "decode", "flux", "wan"],
    )
    parser.add_argument(
        "--size", type=lambda s: tuple(map(int, s.split("x"))), help="of flux and wan; default: the first of SHAPES"
    )
    parser.add_argument("--layers", type=int, help="the first so many alone")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--sequences", type=int, default=1, help="of a step of decoding")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which no way is begun")
    parser.add_argument("--seconds", type=float, default=8, help="of the calls of a median, three calls at least")
    parser.add_argument("--ways", nargs="+", default=["eager", "captured", "compiled", "compiled, captured"])
    parser.add_argument("--table", type=int, default=0, metavar="N", help="also the N longest kernels and their calls")
    parser.add_argument("--out", type=Path)
    runs = [parser.parse_args(words) for words in parted(sys.argv[1:])]
    need_gpus(parser)
    if "RANK" in os.environ:
        join_gpus(parser)
    failed = False
    for options in runs:
        try:
            measure(options)
        except Exception as error:
            failed = True
            print(f"{options.case}: {type(error).__name__}: {error}"[:600], flush=True)
        torch._dynamo.reset()  # whose limit of compilations counts those of all runs
        gc.collect()
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
