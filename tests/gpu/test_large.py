"""What models of real size need, on GPUs: activations in host memory, weights by shards and experts over NCCL ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks import ROOT, environment
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import Offload, recompute
from tests.support.gpu import world

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kinds", [[], ["block", "norm"]])
def test_gradients_are_the_same_from_host_memory(kinds):
    ids = torch.randint(0, 300, (1, 8192), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for offload in (None, Offload(in_flight=1 << 22, least=1 << 16)):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = recompute(HybridLM(HybridConfig(300, 256, ["gdn", "gdn", "attention"], 2)), kinds)
        if offload is None:
            loss = model.loss(ids)
        else:
            with offload:
                loss = model.loss(ids)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert offload is not None
    assert offload.moved > 3 * 8192 * 256 * 4
    assert offload.most_in_flight <= (1 << 22) + max(x.numel() for x in found[0]) * 4 + 8192 * 4096 * 4
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", ["hybrid_8b", "moe_35b_a3b"])
def test_small_models_of_these_shapes_train(shape, gpu_ranks, alone, tmp_path):
    gpu_ranks.stop()  # its ranks hold memory
    command = [sys.executable, "-m", "ring_la", "bench", "large", shape, "--gpus", str(world()), "--tiny"]
    done = subprocess.run(
        [*command, "--length", "4096", "--folder", str(tmp_path), "--out", str(tmp_path / "steps.json")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert len(steps) == 3
    assert all(math.isfinite(step["loss"]) for step in steps)
