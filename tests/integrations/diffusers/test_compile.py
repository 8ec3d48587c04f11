"""Blocks of a parallelized model and a whole one under torch.compile: one graph each, and the same output."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("diffusers")

import ring_la
from ring_la.integrations.diffusers import parallelize
from tests.support.attention_cases import error
from tests.support.pool import group

from .models import make


def called(block, *args, **keywords):
    """A block with its hooks, as a compiled model calls it."""
    return block(*args, **keywords)


def check_compiled(rank: int, name: str) -> dict[str, float]:
    """Breaks in the graph of each block, and the error of a model whose blocks are compiled whole."""
    torch._dynamo.reset()
    model, inputs = make(name)
    if name == "flux":  # a graph for each block would be six; those of a list have two, the first and the others
        for like in (model.transformer_blocks, model.single_transformer_blocks):
            like.append(copy.deepcopy(like[-1]))
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    blocks = [block for path in model._ring_la.plan.blocks for block in getattr(model, path)]
    given: list = []
    hooks = [b.register_forward_pre_hook(lambda *x: given.append(x), with_kwargs=True, prepend=True) for b in blocks]
    with torch.no_grad():
        want = model(**inputs).sample
        for hook in hooks:
            hook.remove()
        model._ring_la.call.started = False  # the first block splits
        found = {
            n: torch._dynamo.explain(called)(b, *args, **kw).graph_break_count for n, (b, args, kw) in enumerate(given)
        }
        torch._dynamo.reset()
        for block in blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(recompile_limit=5):
            for again in ("first", "second"):
                found[f"error of the {again} call"] = error(model(**inputs).sample, want)
            other = inputs | dict(timestep=inputs["timestep"] / 2)
            got = model(**other).sample
        torch.compiler.set_stance("force_eager")
        found["error of another step"] = error(got, model(**other).sample)
        torch.compiler.set_stance("default")
    return found


@pytest.mark.parametrize("name", ["flux", "qwen, masked", "sana video"])
def test_blocks_are_one_graph(ranks, name):
    for found in ranks.run(2, check_compiled, name):
        assert all(n < 1e-9 for n in found.values()), found


def check_whole(rank: int, name: str) -> tuple[int, float]:
    """Breaks in the graph of a whole model, and the error of the model compiled so."""
    torch._dynamo.reset()
    model, inputs = make(name)
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    with torch.no_grad():
        want = model(**inputs).sample
        breaks = torch._dynamo.explain(model)(**inputs).graph_break_count
        torch._dynamo.reset()
        whole = torch.compile(model, fullgraph=True, backend="eager")
        wrong = error(whole(**inputs).sample, want)
        other = inputs | dict(timestep=inputs["timestep"] / 2)  # nothing is left of an earlier step
        return breaks, max(wrong, error(whole(**other).sample, model(**other).sample))


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_models_are_one_graph(ranks, name):
    for breaks, wrong in ranks.run(2, check_whole, name):
        assert breaks == 0
        assert wrong < 1e-9
