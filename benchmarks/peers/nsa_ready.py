"""fla-core's NSA kernels compiled before they are timed: `python -m benchmarks.peers.nsa_ready [--jobs N]`.

At its first call fla-core compiles 40 configurations of them one after the other. Here processes call it on a short
sequence, a share of the configurations each, so that Triton's cache has all; whoever times it tunes among all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from ..chosen import blocks
from ..options import need_gpus

KERNELS = "parallel_nsa_fwd_kernel", "parallel_nsa_bwd_kernel_dq", "parallel_nsa_bwd_kernel_dkv"


def compile_share(n: int, jobs: int) -> None:
    """Call both passes with every jobs-th configuration from the n-th on."""
    from fla.ops.nsa import parallel

    for name in KERNELS:
        tuner = getattr(parallel, name)
        while not hasattr(tuner, "configs"):
            tuner = tuner.fn
        tuner.configs = tuner.configs[n::jobs] or tuner.configs[:1]
    case = blocks(2048, 64, 4, 128, 32, 64, [])  # as many choices as later
    case.arms["FLA"]()(*case.x).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--share", type=int, help="what a process that this one starts is told")
    args = parser.parse_args()
    need_gpus(parser)
    if args.share is not None:
        compile_share(args.share, args.jobs)
        return
    command = [sys.executable, "-m", "benchmarks.peers.nsa_ready", "--jobs", str(args.jobs), "--share"]
    running = [subprocess.Popen([*command, str(n)]) for n in range(args.jobs)]
    sys.exit(max(process.wait() for process in running))


if __name__ == "__main__":
    main()
