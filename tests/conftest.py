"""Fixtures: the pool of ranks, and one thread a process."""

from __future__ import annotations

import pytest
import torch

import tests.support.without_fla  # noqa: F401
from tests.support.pool import Ranks

pytest_plugins = ["tests.support.gpu", "tests.support.lanes", "tests.support.order"]


@pytest.fixture(scope="session")
def ranks():
    """The pool of ranks (see tests/support/pool.py)."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(autouse=True, scope="session")
def _threads():
    torch.set_num_threads(1)
