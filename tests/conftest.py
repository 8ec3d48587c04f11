"""Fixtures: the pool of ranks, and one thread a process."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which looks once
    os.environ.setdefault("TRITON_INTERPRET", "1")

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
