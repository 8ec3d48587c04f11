"""Denoising steps of Diffusers as CUDA graphs: `pytest -m gpu tests/gpu/test_diffusers.py`.

Tiny random transformers: replays give what eager split calls give, a weight that was replaced is seen, and inputs that
differ among the ranks make the output NaN.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

import ring_la
from ring_la.integrations.diffusers import parallelize
from ring_la.integrations.diffusers.compare import mapped
from tests.integrations.diffusers.models import make
from tests.support import pool
from tests.support.attention_cases import error

pytestmark = pytest.mark.gpu
MODELS = ("flux", "sd3", "wan", "sana", "sana video", "ltx2")


def narrow(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().cuda()
    return x.bfloat16() if x.is_floating_point() else x


def check_captured(rank: int, name: str) -> dict[str, float]:
    """Errors of captured calls beside eager ones, over latents that move."""
    cp, found = ring_la.ContextParallel(pool.group(), scan="ring", timeout=60), {}
    models = []
    for capture in (False, True):
        model, inputs = make(name)
        models.append(parallelize(model.cuda().bfloat16(), cp, capture=capture))
    inputs = mapped(inputs, narrow)

    def call(model: torch.nn.Module, n: float) -> torch.Tensor:
        given = inputs | dict(hidden_states=inputs["hidden_states"] * (1 + n))
        with torch.no_grad():
            out = model(**given, return_dict=False)[0].float()
        torch.cuda.synchronize()
        return out

    found["replays"] = max(error(call(models[1], n / 8), call(models[0], n / 8)) for n in range(7))
    step = models[1]._ring_la_captured.step
    found["graphs"] = abs(step.graphs - 1)
    for model in models:
        torch.manual_seed(1)
        model.proj_out.weight = torch.nn.Parameter(torch.randn_like(model.proj_out.weight))
    found["another weight"] = max(error(call(models[1], n / 8), call(models[0], n / 8)) for n in range(5))
    found["graphs afterwards"] = abs(step.graphs - 2)
    if cp.size > 1:
        found["inputs that differ"] = float(not call(models[1], rank).isnan().all())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps(name, gpu_ranks, record_property):
    for found in gpu_ranks.run(gpu_ranks.size, check_captured, name):
        record_property("errors", str(found))
        assert all(e < 1e-2 for e in found.values()), found
