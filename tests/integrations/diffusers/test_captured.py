"""Denoising steps by `ring_la.capture`, with graphs of a stand-in; with CUDA's: tests/gpu/test_diffusers.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

import ring_la
from ring_la.integrations.diffusers import parallelize, restore
from tests.support.pool import group
from tests.support.step_graphs import Repeating, standing

from .models import make


def check_denoising(rank: int) -> None:
    """Another time of every call, a weight that is replaced, and the way back, which gives the graphs' memory up."""
    model, inputs = make("flux")
    inputs = {n: x.detach() for n, x in inputs.items()}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        want = [model(**inputs | dict(timestep=inputs["timestep"] / n)).sample for n in range(1, 8)]
        standing(patch.setattr, Repeating)
        parallelize(model, ring_la.ContextParallel(group(), scan="ring"), capture=True)
        got = [model(**inputs | dict(timestep=inputs["timestep"] / n)).sample for n in range(1, 8)]
        assert model._ring_la_captured.step.graphs == 1
        model.proj_out.weight = torch.nn.Parameter(2 * model.proj_out.weight)  # another kind of call
        for _ in range(5):
            model(**inputs)
        step = model._ring_la_captured.step
        assert step.graphs == 2
        restore(model)
        assert step.graphs == 0
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_denoising_steps(ranks):
    ranks.run(2, check_denoising)
