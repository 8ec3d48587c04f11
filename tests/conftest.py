"""Fixtures: the pool of ranks, and one thread a process. Garbage is looked for among what tests make alone."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before anything imports NumPy: ranks and workers fill the cores
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which looks once
    os.environ.setdefault("TRITON_INTERPRET", "1")
# before anything imports the compiler: of symbolic sizes, finding results again takes less time than keeping them
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

import tests.support.without_fla  # noqa: F401
from tests.support.pool import Ranks

gc.disable()  # imports make no garbage, and looking for it takes a quarter of the time until tests run
pytest_plugins = ["tests.support.gpu", "tests.support.lanes", "tests.support.order"]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session")
def ranks():
    """The pool of ranks (see tests/support/pool.py)."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def gpu_ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """As many ranks as there are GPUs, or `--gpu-ranks` on those there are, joined by NCCL (tests/support/pool.py)."""
    pool = Ranks(max(1, torch.cuda.device_count(), pytestconfig.getoption("gpu_ranks")), "nccl")
    yield pool
    pool.stop()


@pytest.fixture(autouse=True, scope="session")
def _threads():
    torch.set_num_threads(1)
