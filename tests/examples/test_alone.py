"""The examples without torchrun: one process, or a message that says how to start them."""

from __future__ import annotations

import importlib
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone(monkeypatch):
    """A process that torchrun has not started; it leaves the job it makes, and its threads, afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "arguments"), [("train_demo", ()), ("train_hybrid", (timedelta(seconds=9),))])
def test_without_torchrun_there_is_one_rank(alone, name, arguments):
    pytest.importorskip("tqdm")
    importlib.import_module(f"examples.{name}").join(*arguments)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


def trainer_join(rank: int, context: int) -> str:
    """In the pool: what the Trainer's example says to one process, or the shape of its mesh."""
    from examples import trainer_hybrid

    one = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    try:
        return str(trainer_hybrid.join(one, context).shape)
    except SystemExit as error:
        return str(error)


def test_the_trainer_s_example_says_how_to_start(ranks):
    pytest.importorskip("accelerate")
    (said,) = ranks.run(1, trainer_join, 2)
    assert said.startswith("--context: expected a divisor of the number of ranks, 1, got 2; start it with torchrun")
    assert "--nproc_per_node 2, or say --context 1" in said
