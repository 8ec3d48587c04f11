"""Blocks of a parallelized model and a whole one under torch.compile: one graph each, and the same output."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

pytest.importorskip("diffusers")

import ring_la
from benchmarks.diffusion.shapes import SHAPES, build, draw_inputs
from ring_la.integrations.diffusers import parallelize
from tests.support.attention_cases import error
from tests.support.pool import group

from .models import make


def check_compiled(rank: int, name: str) -> list[float]:
    """The errors of two calls of a model whose blocks are compiled whole, which a break in a block's graph refuses."""
    torch._dynamo.reset()
    model, inputs = make(name)
    if name == "flux":  # a graph for each block would be six; those of a list have two, the first and the others
        for like in (model.transformer_blocks, model.single_transformer_blocks):
            like.append(copy.deepcopy(like[-1]))
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    with torch.no_grad():
        want = model(**inputs).sample
        for path in model._ring_la.plan.blocks:
            for block in getattr(model, path):
                block.compile(fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(recompile_limit=5):
            wrong = [error(model(**inputs).sample, want) for _ in range(2)]
            other = inputs | dict(timestep=inputs["timestep"] / 2)
            got = model(**other).sample
        torch.compiler.set_stance("force_eager")
        wrong.append(error(got, model(**other).sample))
        torch.compiler.set_stance("default")
    return wrong


@pytest.mark.parametrize("name", ["flux", "qwen, masked"])
def test_blocks_are_one_graph(ranks, name):
    for found in ranks.run(2, check_compiled, name):
        assert max(found) < 1e-9


def check_gone(rank: int) -> bool:
    """Whether a model that nobody holds any more is gone after compiled calls."""
    torch._dynamo.reset()
    model, inputs = make("wan")
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with torch.no_grad():
        model(**inputs)
    last, model, block = weakref.ref(model), None, None
    torch._dynamo.reset()
    gc.collect()
    return last() is None


def test_compiled_calls_keep_no_model(ranks):
    """Registered operators know a model by its number, and kept the last 64: so many models' weights."""
    assert all(ranks.run(2, check_gone))


def check_sizes(rank: int) -> tuple[list[int], float]:
    """Graphs after each of 20 sizes of a video whose blocks are compiled for all sizes, and the worst error."""
    torch._dynamo.reset()
    shape, cpu, graphs = SHAPES["wan"], torch.device("cpu"), []
    models = [build(shape._replace(tiny=shape.tiny | dict(num_layers=2)), None, True, cpu, torch.float32) for _ in "12"]
    for model in models:
        parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for block in models[0].blocks:
        block.compile(fullgraph=True, dynamic=True, backend=counted)
    after, worst = [], 0.0
    with torch.no_grad():
        for rows in range(5, 25):
            inputs = draw_inputs(shape, (3, 16 * rows, 64), True, cpu, torch.float32)
            got, want = (model(**inputs, return_dict=False)[0] for model in models)
            after.append(len(graphs))
            worst = max(worst, error(got, want))
    return after, worst


def test_blocks_are_compiled_once_for_all_sizes(ranks):
    for after, worst in ranks.run(2, check_sizes):
        assert worst < 1e-5
        assert after[1:] == [after[1]] * 19, after  # a second size may tell what the first had by chance


def check_whole(rank: int, name: str) -> float:
    """The error of a model compiled whole, which a break in its graph refuses."""
    torch._dynamo.reset()
    model, inputs = make(name)
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    with torch.no_grad():
        want = model(**inputs).sample
        whole = torch.compile(model, fullgraph=True, backend="eager")
        wrong = error(whole(**inputs).sample, want)
        other = inputs | dict(timestep=inputs["timestep"] / 2)  # nothing is left of an earlier step
        return max(wrong, error(whole(**other).sample, model(**other).sample))


@pytest.mark.parametrize("name", ["flux", "wan", "sana", "sana video"])
def test_models_are_one_graph(ranks, name):
    assert max(ranks.run(2, check_whole, name)) < 1e-9


def check_gradients(rank: int, name: str) -> float:
    """The worst error of a gradient, of parameters and inputs, of a model compiled whole."""
    torch._dynamo.reset()
    model, inputs = make(name)
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    wanted = [x for x in (*inputs.values(), *model.parameters()) if isinstance(x, torch.Tensor) and x.requires_grad]
    eager, compiled = (
        torch.autograd.grad(called(**inputs).sample.square().mean(), wanted, allow_unused=True)
        for called in (model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    )
    assert [g is None for g in compiled] == [g is None for g in eager]
    return max(error(a, b) for a, b in zip(compiled, eager) if b is not None)


@pytest.mark.parametrize("name", ["flux", "sana", "wan"])
def test_gradients_of_compiled_models(ranks, name):
    assert max(ranks.run(2, check_gradients, name)) < 1e-9
