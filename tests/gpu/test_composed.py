"""Recurrences made of others over NCCL, one rank a GPU, in fp64:
`pytest -m gpu tests/gpu/test_composed.py`."""

from __future__ import annotations

import pytest

import ring_la
from ring_la.testing import check_recurrence
from tests.support import pool
from tests.support.recurrence_cases import COMPOSED


def check(rank: int, name: str) -> None:
    check_recurrence(
        getattr(ring_la, name), pool.group(), documents=("small", "small packed"), kinds=("zigzag",),
        scans=("ring", "all_to_all"),
    )  # fmt: skip


@pytest.mark.parametrize("P", [pytest.param(P, id=f"P{P}", marks=pytest.mark.gpu(needs=P)) for P in (2, 4)])
@pytest.mark.parametrize("name", COMPOSED)
def test_split_is_whole(gpu_ranks, name, P):
    gpu_ranks.run(P, check, name)
