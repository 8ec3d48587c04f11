"""Keys that leave before queries and wide layers (`parallelize(keys_first=True)`): the same output, eager and compiled,
by messages and through rooms that are taken in turns."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("diffusers")

import ring_la
from ring_la.errors import UnsupportedError
from ring_la.integrations.diffusers import parallelize, restore
from tests.support.attention_cases import error
from tests.support.file_memory import over_files
from tests.support.pool import group

from .models import make

EXCHANGES = {"flux": 4, "flux2": 4, "qwen": 2, "bria": 3, "hunyuan": 2, "chroma": 3}
"""Of a call: attentions whose keys leave first. With an odd number the next call begins in the other room."""


def unmasked(name: str) -> tuple[torch.nn.Module, dict]:
    """A model whose masks, if it is given any, are the same for all batch rows: alone then do keys leave first."""
    model, inputs = make(name)
    for mask in ("attention_mask", "encoder_attention_mask"):
        if mask in inputs:
            inputs[mask] = inputs[mask][:1].expand_as(inputs[mask]).contiguous()
    return model, inputs


def stop_within_a_block(model: torch.nn.Module, inputs: dict) -> None:
    """A call that ends, on all ranks, when keys have gone and nobody has attended to them yet."""

    def stop(*_):
        raise KeyError("stopped")

    handle = model.single_transformer_blocks[0].proj_mlp.register_forward_hook(stop)
    with pytest.raises(KeyError):
        model(**inputs)
    handle.remove()


def check_first(rank: int, P: int, names: tuple[str, ...], folder: str) -> list[str]:
    bad = []
    for name in names:
        cp, rooms = over_files(P, folder) if folder else (ring_la.ContextParallel(group(P), scan="ring"), nullcontext())
        model, inputs = unmasked(name)
        calls = [inputs, inputs | dict(timestep=inputs["timestep"] / 2)]
        with torch.no_grad(), rooms:
            wanted = [model(**given).sample for given in calls]
            parallelize(model, cp, keys_first=True)
            if folder:
                stop_within_a_block(model, calls[1])
            for want, given in zip(wanted, calls):
                wrong = error(model(**given).sample, want)
                bad += [f"{name}: {wrong:.1e}"] if wrong > 1e-9 else []
            posts = model._ring_la.call.posts
            bad += [f"{name}: {posts} exchanges"] if posts != EXCHANGES[name] else []
            if folder and name == "flux":
                torch._dynamo.reset()
                got = torch.compile(model, fullgraph=True, backend="eager")(**calls[0]).sample
                bad += ["compiled"] if error(got, wanted[0]) > 1e-9 else []
                restore(model)
                layers = [layer for layer in model.modules() if "ring_la_attention" in layer.__dict__]
                bad += ["restored: marks are left"] if layers else []
    return bad


def test_keys_leave_first(ranks, tmp_path):
    for P, names, folder in ((2, tuple(EXCHANGES), ""), (3, ("flux", "bria"), str(tmp_path))):
        bad = ranks.run(P, check_first, P, names, folder)
        assert not any(bad), (P, bad)


def check_refused(rank: int) -> None:
    model, _ = make("wan")
    with pytest.raises(UnsupportedError, match=r"keys_first.*WanTransformer3DModel"):
        parallelize(model, ring_la.ContextParallel(group(2), scan="ring"), keys_first=True)
    heads = ring_la.ContextParallel(group(2), scan="ring", attention="ulysses")
    with pytest.raises(UnsupportedError, match=r"keys_first.*ulysses"):
        parallelize(make("flux")[0], heads, keys_first=True)


def test_where_they_cannot(ranks):
    assert ranks.run(2, check_refused) == [None, None]
