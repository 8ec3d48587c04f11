"""Diffusers' models and pipelines on GPUs: `pytest -m gpu tests/gpu/test_diffusers.py --gpu-ranks 4`.

whole     tiny random transformers split over the ranks, by the ring, Ulysses and both, give one GPU's output; a whole
          pipeline of Flux (text of one rank, loop, decoder by rows) gives its image, eager, compiled and captured
captured  replays of graphs give what eager split calls give, a weight that was replaced is seen, and inputs that
          differ among the ranks make the output NaN
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

pytest.importorskip("diffusers")

import ring_la
from benchmarks.diffusion.pipelines import flux
from benchmarks.diffusion.shapes import SHAPES, build, draw_inputs
from ring_la.integrations.diffusers import parallelize, restore
from tests.support import pool
from tests.support.attention_cases import error

pytestmark = pytest.mark.gpu
MASKED = "hunyuan_video"


RANKS = (2, 3, 4)
WAYS = ("auto", "ring", "ulysses", "usp")


def enough(P: int, gpu_ranks) -> int:
    """As many ranks, if there are."""
    if gpu_ranks.size < P:
        pytest.skip(f"needs {P} ranks (--gpu-ranks), {gpu_ranks.size} are here")
    return P


def split_by(way: str) -> ring_la.ContextParallel:
    """All ranks; for both strategies on two axes."""
    if way != "usp":
        return ring_la.ContextParallel(pool.group(), scan="ring", attention=way, timeout=60)
    mesh = DeviceMesh("cuda", torch.arange(4).view(2, 2), mesh_dim_names=("ring", "ulysses"))
    return ring_la.ContextParallel(mesh["ring", "ulysses"], scan="ring", attention="usp", timeout=60)


def check_whole(rank: int) -> dict[str, float]:
    """Errors of every model's split output beside one GPU's."""
    device, found = torch.device("cuda", torch.cuda.current_device()), {}
    ways = {2: WAYS[:3], 3: WAYS[:2], 4: WAYS}[pool.group().size()]  # tiny models have four heads
    groups = {way: split_by(way) for way in ways}
    for name, shape in SHAPES.items():
        inputs = draw_inputs(shape, shape.small, True, device, torch.bfloat16)
        with torch.no_grad():
            want = build(shape, None, True, device, torch.bfloat16)(**inputs, return_dict=False)[0].float()
            for way in ways if shape.kernel else ways[:1]:
                model = parallelize(build(shape, None, True, device, torch.bfloat16), groups[way])
                found[f"{name}, {way}"] = error(model(**inputs, return_dict=False)[0].float(), want)
    return found


@pytest.mark.parametrize("P", RANKS)
def test_split_models_are_those_of_one_gpu(P, gpu_ranks, record_property):
    for found in gpu_ranks.run(enough(P, gpu_ranks), check_whole, timeout=240):
        record_property("errors", str(found))
        assert all(e < 2e-2 for e in found.values()), found


def check_pipeline(rank: int) -> dict[str, float]:
    """Errors of images of a split pipeline beside one GPU's, of two prompts."""
    device, found = torch.device("cuda", torch.cuda.current_device()), {}
    cp = ring_la.ContextParallel(pool.group(), scan="ring", timeout=60)

    def images(pipe) -> list[torch.Tensor]:
        pipe.set_progress_bar_config(disable=True)
        how = dict(height=128, width=96, num_inference_steps=6, output_type="pt")
        with torch.backends.cudnn.flags(allow_tf32=False):
            return [pipe(x, generator=torch.Generator().manual_seed(0), **how).images.float() for x in ("one", "two")]

    made = functools.partial(flux, True, device, torch.float32)
    want = images(made())
    for way in ("eager", "graph", "compiled"):
        pipe = made()
        parallelize(pipe, cp, vae=True, text=True, capture=way == "graph")
        if way == "compiled":
            pipe.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        found[way] = max(apart(x, y) for x, y in zip(images(pipe), want))
    assert apart(want[0], want[1]) > 2e-3  # another prompt is seen
    return found


def apart(image: torch.Tensor, want: torch.Tensor) -> float:
    """An error beside what there is to see: an image of random weights is grey."""
    return float((image - want).norm() / (want - want.mean()).norm())


@pytest.mark.parametrize("P", RANKS)
def test_a_whole_pipeline_is_that_of_one_gpu(P, gpu_ranks, record_property):
    for found in gpu_ranks.run(enough(P, gpu_ranks), check_pipeline, timeout=240):
        record_property("errors", str(found))
        assert all(e < 1e-3 for e in found.values()), found


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
    restore(models[1])
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
