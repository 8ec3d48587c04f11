"""Steps at once on a CPU, interpreted, on ranks of their own: `python -m tests.blockwise.at_once gdn,mamba2 gla …`.
After ``--decode`` `BlockReader` beside one forward pass, on one rank and on two.

A vector loop of PyTorch's on CPUs treats the end of a tensor in another way than its middle, which a GPU's kernels do
not. So the ranks' environment says ``ATEN_CPU_CAPABILITY=default``: loops by element are scalar. Prints for each model
(layers apart by commas) what differs from one rank's step. LOOK_AT_BOUNDS=1: what leaves its tensor is an error, too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ring_la.blockwise import switch
from ring_la.softmax.backends.triton import launch
from tests.support.bounds import look_at_bounds
from tests.support.interpreter import compute_bf16, interpreted, multiply_alike
from tests.support.pool import Ranks
from tests.support.same_bits import Run, decoded, differing, step_of

interpreted()

SCALAR = {"ATEN_CPU_CAPABILITY": "default"}
LENGTHS = (66, 1, 35)
RUNS = (Run(4, "zigzag", order=(2, 0, 1)),)
READS = ((1, 34, 30), (1, 66, 64), (2, 98, 94))
"""Ranks, tokens, and how many are read first: then come rows about blocks' 32nd, and their first."""
SECONDS = 600.0


@functools.cache
def as_on_gpus() -> None:
    """In a rank, which is changed for good."""
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT", "loops were chosen before the environment"
    compute_bf16()
    multiply_alike()
    if "LOOK_AT_BOUNDS" in os.environ:
        look_at_bounds()
    switch.everywhere = launch.interpreted = True


def step(rank: int, run: Run, layers: list[str]) -> dict[str, Tensor]:
    as_on_gpus()
    return step_of(rank, run, layers, torch.bfloat16, True, LENGTHS)


def read(rank: int, P: int, T: int, first: int, layers: list[str]) -> list[int]:
    """The places where one of two documents has other logits than in one forward pass."""
    as_on_gpus()
    whole, steps = decoded(rank, P, T, first, layers, torch.bfloat16)
    return [first - 1 + i for i in (whole != steps).any(-1).any(0).nonzero().flatten().tolist()]


def decoding(ranks: Ranks, layers: list[str]) -> dict[tuple[int, int, int], list[list[int]]]:
    """Of each of `READS` the ranks' places, if any."""
    found = {x: ranks.run(x[0], read, *x, layers, timeout=SECONDS) for x in READS}
    return {x: places for x, places in found.items() if any(places)}


def steps(ranks: Ranks, layers: list[str], runs: Sequence[Run] = RUNS) -> tuple[int, list[str]]:
    """How many results a step has, and which differ from one rank's in `runs`."""
    one = ranks.run(1, step, Run(), layers, timeout=SECONDS)[0]
    found = [] if torch.equal(one["loss"], one["loss without gradients"]) else ["the loss without gradients"]
    for run in runs:
        for rank, some in enumerate(ranks.run(run.P, step, run, layers, timeout=SECONDS)):
            found += [f"{run}, rank {rank}: {name}" for name in differing(one, some)]
    return len(one), found


def main(words: list[str]) -> None:
    from tests.blockwise import at_once  # by the name that ranks import it by

    ranks = Ranks(environment=SCALAR)
    for layers in (word.split(",") for word in words if word != "--decode"):
        if "--decode" in words:
            print(",".join(layers), at_once.decoding(ranks, layers) or "equal", flush=True)
        else:
            count, found = at_once.steps(ranks, layers)
            print(",".join(layers), count, found or "equal", flush=True)
    ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
