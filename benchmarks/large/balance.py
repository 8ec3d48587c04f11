"""Seconds of each sequence of a long-tailed mix, cut where a sequence is full or packed by attention's work.

    python -m benchmarks.large.balance --length 131072 --out balance.json

Forward and backward of hybrid_1b's first layers on one device, one sequence after the other. As many replicas would
work on a step's sequences at once, and all wait for the slowest: what is printed is the slowest of each step over the
mean, measured, and by the work that the packing knows, which the seconds are compared with.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ring_la.cli.options import count
from ring_la.models import HybridLM
from ring_la.training import BalancedSequences, Corpus, PackedSequences, StepFlops, recompute

from .. import script
from ..rows import machine, save
from ..timing import wall
from .bench import SHAPES, TINY
from .documents import long_tailed

POOL = 16
"""Steps whose documents `BalancedSequences` packs together, and the mix has as many more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=count, default=131072, help="tokens of a sequence, at most")
    parser.add_argument("--replicas", type=count, default=8, help="sequences of a step, worked on at once")
    parser.add_argument("--steps", type=count, default=2)
    parser.add_argument("--repeat", type=count, default=1, help="of the four layers")
    parser.add_argument("--tiny", action="store_true", help="a few channels, for CPUs")
    parser.add_argument("--out", type=Path, help="also write the seconds as JSON")
    args = parser.parse_args()
    found = measure(args)
    for name, row in found["packed"].items():
        print(f"{name}: slowest over mean {row['measured']:.2f}, by work {row['work']:.2f}; "
              f"{row['tokens per second']:,.0f} tokens a second of a replica")  # fmt: skip
    save(args.out, found)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words = [*SHAPES["hybrid_1b"], *(TINY if args.tiny else []), f"--model.repeat={args.repeat}"]
    shape = script.config(script.load(), words).model.config(257)
    flops, dtype = StepFlops(shape), torch.float32 if args.tiny else torch.bfloat16
    torch.manual_seed(0)
    model = recompute(HybridLM(shape).to(device, dtype), ["gdn", "mlp", "norm"], mlp_chunk=65536)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "documents.jsonl")
        long_tailed(file, (args.steps + POOL) * args.replicas * args.length, args.length)
        corpus = Corpus(Corpus.prepare(str(file), folder, "bytes", "text"))
        ways = {
            "cut in order": PackedSequences(corpus, args.length),
            "by work": BalancedSequences(corpus, args.length, args.replicas, flops.work(), replicas=args.replicas),
        }
        timed(model, *ways["cut in order"][0])
        total = args.steps * args.replicas
        rows = {n: [timed(model, *way[i]) for i in range(total)] for n, way in ways.items()}
        found = {n: compared(rows[n], [flops(way[i][1]) for i in range(total)], args.replicas, sum(
            len(way[i][0]) for i in range(total))) for n, way in ways.items()}  # fmt: skip
    return machine() | {"length": args.length, "replicas": args.replicas, "layers": shape.layers, "packed": found}


def timed(model: HybridLM, ids: torch.Tensor, cu: Sequence[int]) -> float:
    """Seconds of a sequence's loss and gradients."""
    device = next(model.parameters()).device

    def step() -> None:
        tokens, offsets = ids[None].to(device), torch.tensor(cu, dtype=torch.int32, device=device)
        model.loss(tokens, tokens.roll(-1), cu_seqlens=offsets).backward()
        model.zero_grad()

    return wall(step)


def compared(seconds: list[float], work: list[float], replicas: int, tokens: int) -> dict[str, Any]:
    """The slowest sequence of each step over the mean, all steps together: by the clock, and by work."""
    steps = [slice(i, i + replicas) for i in range(0, len(seconds), replicas)]
    worst = lambda x: replicas * sum(max(x[s]) for s in steps) / sum(x)  # noqa: E731
    rate = tokens / replicas / sum(max(seconds[s]) for s in steps)
    return {
        "measured": worst(seconds),
        "work": worst(work),
        "tokens per second": rate,
        "seconds": seconds,
        "flops": work,
    }


if __name__ == "__main__":
    main()
