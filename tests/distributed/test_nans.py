"""`find_nans` names the operator, the layer and the rank in which the first NaN came up, the same on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.models import HybridConfig, HybridLM
from tests.support.pool import group

IDS = torch.arange(37)[None] % 19
LAYERS = ["gdn", "attention", "gla"]


def model() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(19, 16, LAYERS, 2))


def poison(x: Tensor, value: float = math.nan) -> Tensor:
    return torch.where(torch.arange(x.numel()).view(x.shape) == 5, value, x)


def plant(lm: HybridLM, where: str) -> None:
    """A NaN, or an infinity, on one rank."""
    if where == "layer":
        lm.get_submodule("blocks.1.mlp.up_proj").register_forward_hook(lambda *call: poison(call[2]))
    elif where == "decay":
        lm.get_submodule("blocks.2.layer.decay_proj").register_forward_hook(lambda *call: poison(call[2]))
    elif where == "infinity":
        lm.get_submodule("blocks.0.mlp").register_forward_hook(lambda *call: poison(call[2], math.inf))
    elif where == "gradient":

        def hold(*call) -> None:
            call[2].register_hook(poison)

        lm.get_submodule("blocks.1.layer.qkv_proj").register_forward_hook(hold)


def check(rank: int, where: str) -> tuple[str, dict]:
    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring")
    lm, layout = model(), cp.layout(37, "contiguous")
    if rank == 2:
        plant(lm, where)
    try:
        with ring_la.find_nans(lm, cp) as found:
            lm.loss(layout.shard(IDS), layout=layout).backward()
    except ring_la.NotFiniteError as error:
        return str(error), vars(error.first)
    return "", {"first": found.first}


PLANTED = {
    "layer": ("NaN", "forward", "blocks.1.mlp.up_proj", ""),
    "decay": ("NaN", "forward", "blocks.2.layer.decay_proj", ""),
    "infinity": ("infinity", "forward", "blocks.0.mlp", ""),
    "gradient": ("NaN", "backward", "blocks.1.layer.qkv_proj", ""),
}


@pytest.mark.parametrize("where", PLANTED)
def test_what_one_rank_has_is_named_on_all(ranks, where):
    results = ranks.run(3, check, where)
    message, first = results[0]
    assert [m for m, _ in results] == [message] * 3
    kind, direction, layer, op = PLANTED[where]
    assert first["rank"] == 2, message
    assert (first["kind"], first["direction"], first["layer"], first["op"]) == (kind, direction, layer, op), message
    assert not first["arrived"], message
    assert message.startswith(f"the first {kind} is on rank 2, {direction}, layer {layer}")


def check_operators(rank: int) -> list[dict]:
    """A recurrence's own NaN: a decay of NaN comes with its inputs; an exponential that overflows is its own."""
    cp = ring_la.ContextParallel(group(), scan="ring")
    layout, found = cp.layout(20, "contiguous"), []
    rng = torch.Generator().manual_seed(0)
    q, k, v = (layout.shard(torch.randn(1, 20, 2, 4, generator=rng)).requires_grad_() for _ in range(3))
    g = layout.shard(-torch.rand(1, 20, 2, generator=rng))
    bad = poison(g) if rank == 1 else g
    for gates, do in ((bad, 1.0), (g, math.nan if rank == 1 else 1.0)):
        with pytest.raises(ring_la.NotFiniteError) as error, ring_la.find_nans(torch.nn.Identity(), cp):
            ring_la.simple_gla(q, k, v, gates, layout=layout).o.mul(do).sum().backward()
        found.append(vars(error.value.first))
    return found


def test_operators_are_named_forward_and_backward(ranks):
    results = ranks.run(2, check_operators)
    assert results[0] == results[1]
    decay, outside = results[0]
    assert (decay["rank"], decay["op"], decay["direction"], decay["arrived"]) == (1, "simple_gla", "forward", True)
    assert (outside["rank"], outside["op"], outside["step"]) == (1, "", "aten.mul.Tensor")


def test_a_sound_step_is_silent_and_arguments_are_checked(ranks):
    assert ranks.run(3, check, "") == [("", {"first": None})] * 3
    with pytest.raises(ring_la.ArgumentError, match=r"^model: expected a torch\.nn\.Module, got str"):
        ring_la.find_nans("model")
    with pytest.raises(ring_la.ArgumentError, match=r"^cp: expected a ContextParallel or None, got str"):
        ring_la.find_nans(torch.nn.Identity(), "group")
