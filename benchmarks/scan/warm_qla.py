"""Compiles FlashQLA's kernels for `ring-la bench scan` side by side, so that it finds them ready.

    python -m benchmarks.scan.warm_qla [--heads 32] [--keys 16] [--ranks 4] [--lengths 4096,16384,1024] [--jobs 24]

One after the other they take one to two minutes a head configuration. Here each of `jobs` processes makes all the calls
of the benchmark, alone and as every one of `ranks` ranks, but compiles its share of the kernels and launches none: they
write into tensors that their callers make, so what the calls compute is never looked at. TileLang's cache on disk keeps
them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from benchmarks.options import need_gpus
from ring_la.cli.options import count

from .. import environment
from ..options import counts
from ..peers.scan import flash_qla
from .arms import gradients, tokens


def share(part: int, parts: int) -> dict[Hashable, float]:
    """From now on kernels are not launched, and every `parts`-th is compiled; returns the seconds of each."""
    from tilelang.jit import JITImpl

    seen: dict[Hashable, int] = {}
    took: dict[Hashable, float] = {}

    def call(self: Any, *args: Any, **named: Any) -> Callable[..., None]:
        key = (self.func_source, str(args), str(sorted(named.items())))
        number = seen.setdefault(key, len(seen))
        if number % parts == part and key not in took:
            start = time.monotonic()
            self.compile(*args, **named)
            took[key] = round(time.monotonic() - start, 1)
            name = self.func_source.partition("def ")[2].partition("(")[0]
            print(f"{number} {name}: {took[key]} s", flush=True)
        return lambda *_: None

    JITImpl.__call__ = call
    return took


def calls(heads: int, keys: int, ranks: int, lengths: list[int]) -> None:
    """Those of the benchmark, of FlashQLA alone and of each rank under its context parallelism; what a rank receives is
    of the size of what it sends."""
    import flash_qla.ops.gated_delta_rule.chunk.cp.context as context
    import flash_qla.ops.gated_delta_rule.chunk.cp.preprocess as exchange

    for T in lengths:
        x = tokens("gated_delta_rule", "production", (T, heads, 128), torch.bfloat16, torch.device("cuda"), 0, keys)
        do = torch.randn_like(x[2])
        runs = [(flash_qla(T, None), 0)]
        for P in dict.fromkeys((ranks, 2) if ranks > 1 else ()):
            runs += [(flash_qla(T, types.SimpleNamespace(size=P, group=object())), (rank, P)) for rank in range(P)]
        for run, place in runs:
            if place:
                rank, P = place
                ends = {"get_rank": lambda group=None, r=rank: r, "get_world_size": lambda group=None, P=P: P}
                context.dist = exchange.dist = types.SimpleNamespace(**ends)
                exchange.all_gather_into_tensor = lambda x, group=None, P=P: (torch.stack([x] * P), None)
            with torch.no_grad():
                run(*x)
            gradients(run, x, do)
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--keys", type=count, help="heads of q and k (default: as many as --heads)")
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--lengths", type=counts, default=[4096, 16384, 1024], help="tokens a rank, comma-separated")
    parser.add_argument("--jobs", type=count, default=min(24, os.cpu_count() or 1), help="processes")
    parser.add_argument("--seconds", type=float, default=150, help="time to compile in")
    parser.add_argument("--part", type=count, help="be one of the processes, from 1")
    args = parser.parse_args()
    need_gpus(parser)
    if args.part:
        share(args.part - 1, args.jobs)
        return calls(args.heads, args.keys or args.heads, args.ranks, args.lengths)
    end = time.monotonic() + args.seconds
    command = [sys.executable, "-m", "benchmarks.scan.warm_qla", *sys.argv[1:], "--jobs", str(args.jobs), "--part"]
    running = [subprocess.Popen([*command, str(n + 1)], env=environment(OMP_NUM_THREADS="1")) for n in range(args.jobs)]
    late = 0
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            late += 1
    failed = sum(process.wait() != 0 for process in running) - late
    print(f"{args.jobs} processes, {late} stopped before they had compiled all, {failed} failed", flush=True)


if __name__ == "__main__":
    main()
