"""Steps of one run without and with activations in host memory: seconds and GiB of both.

    python -m benchmarks.large.offload hybrid_8b --length 65536 --out offload.json --more --memory.keep_attention true

Takes the options of ``ring-la bench large``, on one rank: --steps of each way, in one process, so that kernels are
compiled once. The losses go on from one another.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from typing import Any

import torch

from .. import script
from ..rows import save
from ..training import logged
from . import bench
from .report import line

IN_FLIGHT = 2.0
"""GiB on their way."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_arguments(parser)
    args = parser.parse_args()
    folder = bench.folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    train, each = script.load(), args.steps
    args.steps *= 2
    whole = train.Trainer.one_step

    def step(self: Any, sequences: Any) -> dict[str, float]:
        if self.step == each:
            self.config.memory.offload = IN_FLIGHT
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return whole(self, sequences)

    train.Trainer.one_step = step
    device, began = train.join(timedelta(seconds=args.limit)), train.Start()
    try:
        bench.on_rank(args, device, began)
    finally:
        torch.distributed.destroy_process_group()
    steps = logged(folder / "metrics.jsonl")
    for n, found in enumerate(steps):
        print("on the device" if n < each else "in host memory", line(found), flush=True)
    if args.out:
        about = json.loads((folder / "about.json").read_text())
        ways = {"on the device": steps[:each], "in host memory": steps[each:]}
        save(args.out, {"command": " ".join(bench.words(args, bench.told)), **about, **ways})


if __name__ == "__main__":
    main()
