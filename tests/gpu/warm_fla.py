"""Compiles and tunes fla-core's context-parallel kernels on one GPU, so that `ring-la bench scan` finds them ready.

    python -m tests.gpu.warm_fla [--processes 7] [--seconds 120]

Their autotuning compiles every configuration of every kernel one after the other, which takes minutes. Here processes
first compile a slice of the configurations each (nothing is timed), then one process an op tunes as fla-core does, on
compiled kernels. Triton's cache on disk keeps both. The exchange is imitated: every rank's summary is this rank's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import types

import torch

from ring_la.cli.scan_cases import OPS, fla, gradients, tokens

SHAPES = ((4096, 32, 128), (16384, 32, 128))


def slice_only(part: int, parts: int) -> None:
    """This process's autotuners only compile, and only their share of the configurations."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.prune_configs

    def share(self, kwargs):
        configs = whole(self, kwargs)
        return configs[part::parts] or configs[:1]

    def once(self):
        def call(kernel, quantiles=None, **_):
            kernel()
            return [1.0] * len(quantiles or (0.5,))

        return call

    def in_memory(self, key, configs, bench):
        bench()
        return False

    Autotuner.prune_configs, Autotuner.do_bench, Autotuner.check_disk_cache = share, property(once), in_memory


def run_op(name: str) -> None:
    """Forward and backward, alone and as the middle one of three ranks."""
    import fla.ops.cp.chunk_delta_h as chain
    from fla.ops.cp.context import FLACPContext

    chain.all_gather_into_tensor = lambda inp, group=None: (torch.stack([inp] * 3), None)
    chain.dist = types.SimpleNamespace(get_rank=lambda group: 1, get_world_size=lambda group: 3)
    import importlib

    module, function = OPS[name].fla.split(".")
    op = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    for shape in SHAPES:
        x = tokens(name, "trained", shape, torch.bfloat16, torch.device("cuda"), 0)
        cu = torch.tensor([0, shape[0]], device="cuda")
        middle = FLACPContext(
            group=object(), cu_seqlens=cu.int(), cu_seqlens_cpu=cu.int().cpu(), is_first_rank=False, is_last_rank=False,
            pre_num_ranks=1, post_num_ranks=1,
        )  # fmt: skip
        for call in (fla(name, shape[0], None), lambda *x, middle=middle: op(*x, cp_context=middle)[0]):
            gradients(call, x, torch.randn_like(x[2]))
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="gated_delta_rule,kda")
    parser.add_argument("--processes", type=int, default=7, help="an op")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if args.part >= 0:
            slice_only(args.part, args.processes)
        return run_op(args.one)
    start, command = time.monotonic(), [sys.executable, "-m", "tests.gpu.warm_fla", "--processes", str(args.processes)]
    ops = args.ops.split(",")
    compiling = [
        subprocess.Popen([*command, "--one", op, "--part", str(n)]) for op in ops for n in range(args.processes)
    ]
    finish(compiling, start + 0.7 * args.seconds)
    print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)
    for op in ops:  # one at a time: what is timed is alone
        finish([subprocess.Popen([*command, "--one", op])], start + args.seconds)
        print(f"{op} tuned: {time.monotonic() - start:.0f} s", flush=True)


def finish(processes: list[subprocess.Popen], deadline: float) -> None:
    for process in processes:
        try:
            if process.wait(max(0.0, deadline - time.monotonic())):
                print(f"failed: {process.args[-4:]}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"not within its time: {process.args[-4:]}", flush=True)


if __name__ == "__main__":
    main()
