"""Fixtures of the tests on GPUs: the pool of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.pool import Ranks


@pytest.fixture
def alone() -> None:
    """For what takes all of a GPU: other processes of this run would hold some of it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("needs the GPU alone: run it without -n")


@pytest.fixture(scope="session")
def gpu_ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """As many ranks as there are GPUs, or `--gpu-ranks` on those there are, joined by NCCL (tests/support/pool.py)."""
    pool = Ranks(max(1, torch.cuda.device_count(), pytestconfig.getoption("gpu_ranks")), "nccl")
    yield pool
    pool.stop()
