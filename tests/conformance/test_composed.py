"""Recurrences made of others: outputs, final states and every gradient against the fp64 token loops, on one device and
split over P = 1 to 4 ranks by every scan."""

from __future__ import annotations

import functools

import pytest
import torch

import ring_la
from ring_la.testing.recurrences import TOLERANCE, Truth, check_recurrence, errors
from tests.support.pool import group
from tests.support.recurrence_cases import BY_NAME, COMPOSED

SPLITS = {
    1: (("small packed", "zigzag", "ring"),),
    2: (("small", "contiguous", "ring"), ("small packed", "zigzag", "doubling")),
    3: (("small packed", "contiguous", "all_gather"), ("small", "zigzag", "all_to_all")),
    4: (("small packed", "zigzag", "pipelined"), ("small", "contiguous", "doubling")),
}
"""By P: documents that start and end inside shards, uneven lengths, a sequence shorter than its segments."""


@functools.lru_cache
def truth(name: str, documents: str) -> Truth:
    return Truth(BY_NAME[name], documents)


@pytest.mark.parametrize("name", COMPOSED)
def test_one_device_is_the_reference(name):
    check_recurrence(getattr(ring_la, name), documents=("small", "small packed"))


def split(rank: int, name: str, cases: list[tuple[Truth, str, str]]) -> list[dict[str, float]]:
    return [
        errors(getattr(ring_la, name), true, ring_la.ContextParallel(group(), scan=scan), kind)
        for true, kind, scan in cases
    ]


@pytest.mark.parametrize("name", COMPOSED)
def test_split_is_whole(ranks, name):
    bad = []
    for P, cases in SPLITS.items():
        found = ranks.run(P, split, name, [(truth(name, documents), kind, scan) for documents, kind, scan in cases])
        for rank, by_case in enumerate(found):
            for case, worst in zip(cases, by_case):
                bad += [f"P {P} rank {rank} {case} {n}: {e:.1e}" for n, e in worst.items()
                        if not e <= TOLERANCE[torch.float64]]  # fmt: skip
    assert not bad, bad[:12]
