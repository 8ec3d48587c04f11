"""Long sequences trained on all GPUs, by examples/train_hybrid.py itself: `pytest -m gpu tests/gpu/test_training.py`.

Each part is a torchrun of its own; benchmarks/training.py runs them all under one, and keeps what they logged.
"""

from __future__ import annotations

import math

import pytest

pytest.importorskip("jsonargparse", reason="the training example reads its options with jsonargparse")

from benchmarks.training import PARTS, options_of, run
from tests.support.gpu import world

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", PARTS)
def test_training(part, gpu_ranks, alone, record_property):
    gpu_ranks.stop()  # its ranks hold memory
    (result,) = run({part: options_of(part, world())}, world(), PARTS[part][1], lambda found: None).values()
    losses = [step["loss"] for step in result["steps"]]
    record_property("losses", losses)
    record_property("training seconds", result["seconds"])
    assert result["outcome"] == "exit 0", result["tail"][-3000:]
    assert losses
    assert all(map(math.isfinite, losses))
