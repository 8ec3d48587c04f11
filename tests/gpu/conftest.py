"""Fixtures of the tests on GPUs."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def alone() -> None:
    """For what takes all of a GPU: other processes of this run would hold some of it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("needs the GPU alone: run it without -n")
