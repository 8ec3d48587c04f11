"""The cost model behind ``scan="auto"``: latency α and bandwidth β of a group, measured once, and what follows.

A message of n bytes costs α + n/β. α and β are fitted from two sizes for each of three patterns: one hop to the
next rank, an all-gather and an all-to-all (per byte received). The slowest rank's figures are used by all ranks, so
that all choose alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm import Group

SMALL, LARGE, REPEATS = 16 * 1024, 2 * 1024 * 1024, 5


@dataclass(frozen=True)
class Wire:
    """α in seconds, β in bytes a second, of one pattern."""

    alpha: float
    beta: float

    def __call__(self, size: float) -> float:
        return self.alpha + size / self.beta


@dataclass(frozen=True)
class CostModel:
    """Predicted seconds of each strategy on a group of `ranks` ranks."""

    ranks: int
    hop: Wire
    gather: Wire
    exchange: Wire

    @classmethod
    def measure(cls, group: Group) -> CostModel:
        """Measure α and β of `group`; collective, well under two seconds on one host."""
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size

        def hop(n: int) -> None:
            x = torch.zeros(n, dtype=torch.uint8, device=group.device)
            group.exchange({right: x}, {left: torch.empty_like(x)}).wait()

        def gather(n: int) -> None:
            group.all_gather(torch.zeros(n // (group.size - 1), dtype=torch.uint8, device=group.device)).wait()

        def exchange(n: int) -> None:
            rows = torch.zeros(group.size, n // (group.size - 1), dtype=torch.uint8, device=group.device)
            group.all_to_all(rows).wait()

        return cls(group.size, *(_fit(f, group) for f in (hop, gather, exchange)))

    def predict(self, state: int, transition: int, links: int) -> dict[str, float]:
        """Seconds each strategy takes for states and transitions of these bytes over `links` links in all."""
        p, blocks = self.ranks, PIPELINE_BLOCKS
        states = state * max(1, links // p)
        both = states + transition * max(1, links // p)
        return {
            "ring": (links - 1) * self.hop(state),
            "pipelined": (links - 2 + blocks) * self.hop(state / blocks),
            "all_gather": self.gather((p - 1) * both),
            "doubling": math.ceil(math.log2(max(2, links))) * self.hop(both),
            "all_to_all": self.exchange((p - 1) / p * both) + self.exchange((p - 1) / p * states),
        }

    def best(self, state: int, transition: int, links: int) -> str:
        """The strategy with the lowest prediction."""
        predictions = self.predict(state, transition, links)
        return min(predictions, key=predictions.__getitem__)


PIPELINE_BLOCKS = 4


def _fit(run: Callable[[int], None], group: Group) -> Wire:
    small, large = _seconds(run, SMALL, group), _seconds(run, LARGE, group)
    times = torch.tensor([small, large], dtype=torch.float64, device=group.device)
    small, large = group.all_reduce(times, op=dist.ReduceOp.MAX).wait().tolist()
    beta = (LARGE - SMALL) / max(large - small, 1e-9)
    return Wire(max(small - SMALL / beta, 1e-7), beta)


def _seconds(run: Callable[[int], None], size: int, group: Group) -> float:
    """Median seconds of one call."""
    times = []
    for _ in range(REPEATS + 1):
        if group.on_cuda:
            torch.cuda.synchronize(group.device)
        start = time.perf_counter()
        run(size)
        if group.on_cuda:
            torch.cuda.synchronize(group.device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]
