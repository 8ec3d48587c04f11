"""Write a checkpoint, of whatever split, as files that others read.

    ring-la export runs/hybrid weights.safetensors        one file of weights, with the configuration in its metadata
    ring-la export runs/qwen folder                       a model of Transformers: what from_pretrained reads
    ring-la export runs/demo folder --dtype bfloat16      a HybridLM: model.safetensors and config.json

RUN is what training left: a folder of examples/train_hybrid.py or train_demo.py, or a checkpoint.pt. One process, on
the CPU. What is written of a HybridLM, `ring-la serve` reads too. Needs the extra "export" (safetensors); a model of
Transformers also transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..training.exports import DTYPES, export
from .options import amount


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="what training left")
    parser.add_argument("out", metavar="OUT", type=Path, help="a file that ends in .safetensors, or a folder")
    parser.add_argument("--step", type=amount, help="of a run, which checkpoint (default: the newest)")
    parser.add_argument("--dtype", default="stored", choices=DTYPES, help="of the weights")


def run(args: argparse.Namespace) -> None:
    for file in export(args.run, args.out, step=args.step, dtype=args.dtype):
        print(f"{file}  {file.stat().st_size / 2**20:,.1f} MiB")
