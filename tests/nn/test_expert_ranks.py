"""What experts on several ranks refuse: on every rank, before anything is sent."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la.errors import RingLAError
from ring_la.nn.expert_ranks import ExpertRanks
from tests.support.pool import group

WRONG = {
    "chosen": (dict(chosen=torch.tensor([[0, 4]] * 3)), dict(chosen=torch.tensor([[0, -1]] * 3)),
               dict(chosen=torch.ones(3, 2)), dict(chosen=torch.ones(3, 0, dtype=torch.int64))),
    "weights": (dict(weights=torch.ones(3, 1)), dict(chosen=torch.ones(3, 1, dtype=torch.int64))),
    "x": (dict(x=torch.ones(3, 5)), dict(x=torch.ones(3, 4, dtype=torch.float64)), dict(x=None)),
}  # fmt: skip


def check(rank: int) -> None:
    experts = ExpertRanks(4, ring_la.ContextParallel(group(2), scan="ring").comm)
    right = dict(x=torch.ones(3, 4), chosen=torch.tensor([[0, 3]] * 3), weights=torch.ones(3, 2))
    for name, calls in WRONG.items():
        for change in calls:
            with pytest.raises(RingLAError, match=rf"{name}(: expected|=)"):
                experts(**right | (change if rank else {}), compute=lambda rows, sizes: rows)


def test_what_one_rank_is_given_wrong_all_refuse(ranks):
    """A router that picks more experts on one rank ended the other's process."""
    ranks.run(2, check, timeout=30)


def check_twice(rank: int) -> float:
    """A token that picks an expert twice has its result twice."""
    experts = ExpertRanks(3, ring_la.ContextParallel(group(2), scan="ring").comm)
    x, chosen = torch.eye(4) * (1 + rank), torch.tensor([[2, 2], [0, 1], [1, 1], [2, 0]])
    factors = torch.tensor([1.0, 10.0, 100.0])

    def compute(rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return rows * factors[experts.mine].repeat_interleave(sizes)[:, None]

    found = experts(x, chosen, torch.full((4, 2), 0.5), compute)
    return float((found - x * (factors[chosen] * 0.5).sum(1, keepdim=True)).abs().max())


def test_an_expert_that_is_picked_twice(ranks):
    assert ranks.run(2, check_twice) == [0.0, 0.0]
