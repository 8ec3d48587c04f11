"""Times and memory of a call that all ranks make, beside the bound on one GPU."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ring_la.softmax import attention

from ..peers.attention import Call
from ..timing import elapsed, graph_of, largest

WARM = 2
ROUNDS, ENOUGH = (7, 25), 300.0
"""The least and the most rounds, and the ms that they should take."""
IN_A_ROW, SHORT = 10, 20.0
"""Calls measured in a row, where forward + backward takes less than so many ms."""


class Timed:
    """A call to be timed: forward, and forward with backward."""

    def __init__(self, call: Call, tensors: list[Tensor], do: Tensor) -> None:
        self.call, self.do = call, do
        self.leaves = [t.detach().requires_grad_() for t in tensors]

    @torch.no_grad()
    def forward(self) -> None:
        self.call(*self.leaves)

    def total(self) -> None:
        torch.autograd.grad(self.call(*self.leaves), self.leaves, self.do)

    @functools.cached_property
    def graphs(self) -> dict[str, torch.cuda.CUDAGraph]:
        """Of both."""
        return {name: graph_of(getattr(self, name), warm=1) for name in ("forward", "total")}


def milliseconds(functions: Sequence[Callable[[], object]], calls: int = 1) -> list[float]:
    """Median time of one of `calls` in a row of each function, of the slowest rank. The functions take turns, so that
    a clock that drifts or a host that is busy is no difference between them."""
    together = torch.zeros(1, device="cuda")

    def once(function: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        dist.all_reduce(together)
        return elapsed(function, calls)

    first = [[once(f) for _ in range(WARM)] for f in functions]
    enough = largest([sum(t[-1] for t in first) * calls])[0]
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(ENOUGH / enough)))
    times = [[once(f) for f in functions] for _ in range(rounds)]
    return largest(statistics.median(t) for t in zip(*times))


def measure(ours: Timed, bound: Timed, graphs: bool) -> dict[str, float]:
    """Forward, forward + backward (ms): of one call, of one in a row if that is short, replayed if so asked; of the
    bound in the same way and the same rounds ("bound_…"), and its share of ours ("share_…")."""
    row: dict[str, float] = {}

    def take(prefix: str, pairs: dict[str, list[Callable[[], object]]], calls: int = 1) -> None:
        for name, pair in pairs.items():
            time, limit = milliseconds(pair, calls)
            name = prefix + name
            row[name], row[f"bound_{name}"], row[f"share_{name}"] = time, limit, limit / time

    eager = dict(forward=[ours.forward, bound.forward], total=[ours.total, bound.total])
    take("", eager)
    if row["total"] < SHORT:
        take("row_", eager, IN_A_ROW)
    if graphs:
        take("graph_", {name: [ours.graphs[name].replay, bound.graphs[name].replay] for name in eager})
    return row


def bound_of(T: int, P: int, H: int, groups: int, D: int, backend: str, share: float, softcap: float) -> Timed:
    """One non-causal call with ``share`` of the FLOPs of T × T·P scores."""
    keys = max(128, int(T * P * share) // 128 * 128)
    q, do = (torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, keys, groups, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Timed(lambda *x: attention(*x, causal=False, softcap=softcap, backend=backend).o, [q, k, v], do)
