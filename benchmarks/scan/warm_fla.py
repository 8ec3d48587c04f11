"""Compiles and tunes fla-core's context-parallel kernels on one GPU, so that `ring-la bench scan` finds them ready.

    python -m benchmarks.scan.warm_fla [--ops gated_delta_rule,kda] [--keys 16] [--gates production] [--seconds 150]

As `peers/fla_tuning.py` does it, which also says what Triton's cache then holds. The exchange is imitated:
every rank's summary is this rank's.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import types

import torch

from benchmarks.options import need_gpus
from ring_la.cli.options import count

from ..peers import fla_tuning
from ..peers.scan import fla, function
from .arms import gradients, promised, tokens

LENGTHS = 4096, 16384


def call(name: str, shape: str) -> None:
    """Forward and backward, alone and as the middle one of three ranks, at TxHEADSxWIDTHxKEYSxGATES."""
    import fla.ops.cp.chunk_delta_h as chain
    from fla.ops.cp.context import FLACPContext

    chain.all_gather_into_tensor = lambda inp, group=None: (torch.stack([inp] * 3), None)
    chain.dist = types.SimpleNamespace(get_rank=lambda group: 1, get_world_size=lambda group: 3)
    *sizes, gates = shape.split("x")
    T, heads, width, keys = map(int, sizes)
    x = tokens(name, gates, (T, heads, width), torch.bfloat16, torch.device("cuda"), 0, keys)
    bounded = bool(promised(name, gates))
    op = functools.partial(function(name), safe_gate=True) if bounded else function(name)
    cu = torch.tensor([0, T], device="cuda")
    middle = FLACPContext(
        group=object(), cu_seqlens=cu.int(), cu_seqlens_cpu=cu.int().cpu(), is_first_rank=False, is_last_rank=False,
        pre_num_ranks=1, post_num_ranks=1,
    )  # fmt: skip
    for run in (fla(name, T, None, bounded), lambda *x: op(*x, cp_context=middle)[0]):
        gradients(run, x, torch.randn_like(x[2]))
        torch.cuda.synchronize()


def main() -> None:
    if sys.argv[1:2] in (["compile"], ["tune"]):
        return fla_tuning.main(call, fake=False)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="gated_delta_rule,kda")
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--keys", type=count, help="heads of q and k (default: as many as --heads)")
    parser.add_argument("--gates", default="trained", choices=("trained", "none", "production"))
    parser.add_argument("--jobs", type=count, default=min(16, os.cpu_count() or 1), help="each holds GiB of the GPU")
    parser.add_argument("--seconds", type=float, default=150)
    args = parser.parse_args()
    need_gpus(parser)
    more = f"{args.heads}x128x{args.keys or args.heads}x{args.gates}"
    rows = [(op, f"{T}x{more}") for op in args.ops.split(",") for T in LENGTHS]
    print(fla_tuning.tune(rows, args.seconds, args.jobs, "benchmarks.scan.warm_fla"), flush=True)


if __name__ == "__main__":
    main()
