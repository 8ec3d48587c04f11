"""Steps at once on a CPU, interpreted, on ranks of their own: `python -m tests.blockwise.at_once gdn,mamba2 gla …`.
After ``--decode`` `BlockReader` beside one forward pass, on one rank and on two.

A vector loop of PyTorch's on CPUs treats the end of a tensor in another way than its middle, which a GPU's kernels do
not. So the environment says ``ATEN_CPU_CAPABILITY=default``: loops by element are scalar. Prints for each model (layers
apart by commas) what differs from one rank's step. LOOK_AT_BOUNDS=1: what leaves its tensor is an error, too.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from ring_la.blockwise import switch
from ring_la.softmax.backends.triton import launch
from tests.support.bounds import look_at_bounds
from tests.support.interpreter import compute_bf16, interpreted, multiply_alike
from tests.support.pool import Ranks
from tests.support.same_bits import Run, decoded, differing, step_of

interpreted()
compute_bf16()
multiply_alike()
if "LOOK_AT_BOUNDS" in os.environ:
    look_at_bounds()

LENGTHS = (66, 1, 35)
READS = ((1, 34, 30), (1, 66, 64), (2, 98, 94))
"""Ranks, tokens, and how many are read first: then come rows about blocks' 32nd, and their first."""
SECONDS = 600.0


def step(rank: int, run: Run, layers: list[str]) -> dict[str, Tensor]:
    switch.everywhere = launch.interpreted = True
    return step_of(rank, run, layers, torch.bfloat16, True, LENGTHS)


def read(rank: int, P: int, T: int, first: int, layers: list[str]) -> list[int]:
    """The places where one of two documents has other logits than in one forward pass."""
    switch.everywhere = launch.interpreted = True
    whole, steps = decoded(rank, P, T, first, layers, torch.bfloat16)
    return [first - 1 + i for i in (whole != steps).any(-1).any(0).nonzero().flatten().tolist()]


def decode(models: list[list[str]], reads: tuple[tuple[int, int, int], ...]) -> None:
    from tests.blockwise import at_once  # by the name that ranks import it by

    ranks = Ranks(max(P for P, _, _ in reads))
    for layers in models:
        found = {x: f for x in reads for f in ranks.run(x[0], at_once.read, *x, layers, timeout=SECONDS) if f}
        print(",".join(layers), found or "equal", flush=True)
    ranks.stop()


def main(models: list[list[str]], runs: tuple[Run, ...]) -> None:
    from tests.blockwise import at_once  # by the name that ranks import it by

    ranks = Ranks(max(run.P for run in runs))
    for layers in models:
        one = ranks.run(1, at_once.step, Run(), layers, timeout=SECONDS)[0]
        found = [] if torch.equal(one["loss"], one["loss without gradients"]) else ["the loss without gradients"]
        for run in runs:
            for rank, some in enumerate(ranks.run(run.P, at_once.step, run, layers, timeout=SECONDS)):
                found += [f"{run}, rank {rank}: {name}" for name in differing(one, some)]
        print(",".join(layers), len(one), found or "equal", flush=True)
    ranks.stop()


if __name__ == "__main__":
    models = [words.split(",") for words in sys.argv[1:] if words != "--decode"]
    if "--decode" in sys.argv:
        decode(models, READS)
    else:
        main(models, (Run(4, "zigzag", order=(2, 0, 1)),))
