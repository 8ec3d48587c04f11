"""Denoising steps of Diffusers as CUDA graphs: `pytest -m gpu tests/gpu/test_diffusers.py`.

Tiny random transformers: replays give what eager split calls give, a weight that was replaced is seen, and inputs that
differ among the ranks make the output NaN.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

import ring_la
from benchmarks.diffusion.shapes import SHAPES, build, draw_inputs
from ring_la.integrations.diffusers import parallelize
from tests.support import pool
from tests.support.attention_cases import error

pytestmark = pytest.mark.gpu
MASKED = "hunyuan_video"


def check_captured(rank: int, name: str, keys_first: bool = False) -> dict[str, float]:
    """Errors of captured calls beside eager ones, over latents that move; keys of the former may leave first."""
    device, shape = torch.device("cuda", torch.cuda.current_device()), SHAPES[name]
    cp, found = ring_la.ContextParallel(pool.group(), scan="ring", timeout=60), {}
    models = [build(shape, None, True, device, torch.bfloat16) for _ in range(2)]
    for model, capture in zip(models, (False, True)):
        parallelize(model, cp, capture=capture, keys_first=keys_first and capture)
    inputs = draw_inputs(shape, shape.small, True, device, torch.bfloat16)

    def call(model: torch.nn.Module, n: float) -> torch.Tensor:
        given = inputs | dict(hidden_states=inputs["hidden_states"] * (1 + n))
        with torch.no_grad():
            out = model(**given, return_dict=False)[0].float()
        torch.cuda.synchronize()
        return out

    def apart(calls: int) -> float:
        return max(error(call(models[1], n / 8), call(models[0], n / 8)) for n in range(calls))

    found["replays"] = apart(7)
    step = models[1]._ring_la_captured.step
    found["graphs"] = abs(step.graphs - 1)
    for model in models:
        torch.manual_seed(1)
        model.proj_out.weight = torch.nn.Parameter(torch.randn_like(model.proj_out.weight))
    found["another weight"] = apart(5)
    found["graphs afterwards"] = abs(step.graphs - 2)
    if cp.size > 1:
        found["inputs that differ"] = float(not call(models[1], rank).isnan().all())
    return found


@pytest.mark.parametrize("name", [name for name in SHAPES if name != MASKED])
def test_captured_steps(name, gpu_ranks, record_property):
    for found in gpu_ranks.run(gpu_ranks.size, check_captured, name):
        record_property("errors", str(found))
        assert all(e < 1e-2 for e in found.values()), found


@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_captured_steps_whose_keys_leave_first(name, gpu_ranks, record_property):
    for found in gpu_ranks.run(gpu_ranks.size, check_captured, name, True):
        record_property("errors", str(found))
        assert all(e < 1e-2 for e in found.values()), found


def check_refused(rank: int) -> str:
    with pytest.raises(ring_la.UnsupportedError) as refused:
        check_captured(rank, MASKED)
    return str(refused.value)


def test_masks_are_not_captured(gpu_ranks):
    """Which keys a mask leaves out is read by the host."""
    for said in gpu_ranks.run(gpu_ranks.size, check_refused):
        assert "one that a CUDA graph can repeat" in said
