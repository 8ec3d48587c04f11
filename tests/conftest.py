"""Fixtures: the pool of ranks, and one thread a process."""

from __future__ import annotations

import pytest
import torch

import tests.without_fla  # noqa: F401
from tests.distributed.pool import Ranks

pytest_plugins = ["tests.support.gpu"]


@pytest.fixture(scope="session")
def ranks():
    """The pool of ranks (see tests/distributed/pool.py)."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(autouse=True, scope="session")
def _threads():
    torch.set_num_threads(1)
