"""Experts over the ranks of a sequence: exact by themselves, and in whole models, whose norms and loss are fp32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.gpu import on_gpus
from tests.support.pool import group
from tests.support.transformers_models import CASES, VOCABULARY


def make(name: str):
    """The model in fp64, which the library's grouped products do not take; its norms and its loss stay in fp32."""
    model = CASES[name].make().double()
    model.config._experts_implementation = "eager"
    return model


def exact(a, b, name: str = "", rtol: float = 2e-4, atol: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")


def modules(rank: int, name: str) -> None:
    """The experts by themselves, in fp64 throughout: results and every gradient, where a rank has no token too."""
    from torch.distributed.device_mesh import DeviceMesh

    import ring_la
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.experts import split_experts

    cp = ring_la.ContextParallel(group(), scan="ring", timeout=60)
    model, alone = parallelize(make(name), cp, check=False), make(name)
    spread = split_experts(model, DeviceMesh.from_group(group(), torch.get_default_device().type))[0]
    whole = next(m for m in alone.modules() if hasattr(m, "has_gate"))
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    x = torch.randn(30, 32, dtype=torch.float64, generator=generator)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(30)])
    weights, dy = (torch.rand(n, dtype=torch.float64, generator=generator) for n in ((30, 2), (30, 32)))
    borders = [*[0, 17, 17, 30, 30][: cp.size], 30]  # one rank has no token
    mine = slice(borders[rank], borders[rank + 1])
    parts = [t.clone().requires_grad_() for t in (x, weights)]
    want = whole(parts[0], chosen, parts[1])
    expected = torch.autograd.grad(want, [*parts, *whole.parameters()], dy)
    own = [t[mine].clone().requires_grad_() for t in (x, weights)]
    got = spread(own[0], chosen[mine], own[1])
    found = torch.autograd.grad(got, [*own, *spread.parameters()], dy[mine])
    exact(got, want[mine], "results", 1e-12, 1e-12)
    for i, (a, b) in enumerate(zip(found, expected)):
        exact(a if i < 2 else a.full_tensor(), b[mine] if i < 2 else b, f"gradient {i}", 1e-11, 1e-12)


@pytest.mark.parametrize(("ranks_", "name"), [(1, "qwen3_5_moe"), (2, "nemotron_h"), (3, "qwen3_next"), (4, "gpt_oss")])
def test_experts_by_themselves_are_exact(ranks, ranks_, name):
    ranks.run(ranks_, modules, name)


@pytest.mark.gpu
@pytest.mark.parametrize(("P", "name"), [(2, "qwen3_5_moe"), (2, "nemotron_h"), (3, "gpt_oss"), (4, "qwen3_next")])
def test_experts_by_themselves_are_exact_on_gpus(gpu_ranks, P, name):
    on_gpus(gpu_ranks, P, modules, name)


def compare(rank: int, name: str) -> int:
    from torch.distributed.device_mesh import DeviceMesh

    import ring_la
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.experts import split_experts
    from ring_la.training import sum_gradients
    from ring_la.training.clipping import clip_gradients

    x = torch.randint(3, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(3))
    routers = {"output_router_logits": True} if CASES[name].router else {}
    alone = make(name)
    want = alone(input_ids=x, labels=x, use_cache=False, **routers)
    want.loss.backward()
    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring", timeout=60)
    model = parallelize(make(name), cp, check=False)  # whose fp32 parts the check takes for leaks in fp64
    spread = split_experts(model, DeviceMesh.from_group(group(), "cpu"))
    got = model(input_ids=x, labels=x, **routers)
    got.loss.backward()
    exact(got.loss, want.loss, "loss")
    exact(got.logits, got.layout.shard(want.logits), "logits")
    ours = {id(p) for module in spread for p in module.parameters()}
    sum_gradients((p for p in model.parameters() if id(p) not in ours), cp)
    for (n, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = torch.zeros_like(q) if p.grad is None else p.grad
        exact(grad.full_tensor() if id(p) in ours else grad, torch.zeros_like(q) if q.grad is None else q.grad, n)
    exact(clip_gradients(model.parameters(), 0.1), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
    for p, q in zip(model.parameters(), alone.parameters()):
        if id(p) in ours:
            exact(p.grad.full_tensor(), q.grad)
    return sum(p.to_local().numel() for module in spread for p in module.parameters())


@pytest.mark.parametrize(("ranks_", "name"), [(1, "qwen3_5_moe"), (2, "nemotron_h"), (3, "gpt_oss"), (4, "qwen3_next")])
def test_experts_on_several_ranks_compute_what_one_process_does(ranks, ranks_, name):
    held = ranks.run(ranks_, compare, name)
    assert max(held) <= -(-4 // ranks_) * sum(held) / 4  # of four experts


def refused(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    import ring_la
    from ring_la import ArgumentError, UnsupportedError
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.experts import split_experts

    mesh = DeviceMesh.from_group(group(), "cpu")
    cp = ring_la.ContextParallel(group(), scan="ring")
    with pytest.raises(ArgumentError, match="model: expected one that parallelize was given"):
        split_experts(CASES["qwen3_next"].make(), mesh)
    with pytest.raises(UnsupportedError, match="model: expected a mixture whose experts are stacked"):
        split_experts(parallelize(CASES["llama"].make(), cp, check=False), mesh)
    with pytest.raises(UnsupportedError, match="average: expected False"):
        split_experts(parallelize(CASES["qwen3_next"].make(), cp, average=True, check=False), mesh)


def test_what_cannot_be_spread_is_refused(ranks):
    ranks.run(1, refused)


def sharded(rank: int) -> None:
    from torch.distributed.fsdp import FSDPModule

    from ring_la import ContextParallel
    from ring_la.integrations.transformers import parallelize
    from ring_la.integrations.transformers.experts import split_experts
    from ring_la.training import TrainingMesh, shard_parameters

    mesh, cp = TrainingMesh.make("cpu"), ContextParallel(group(), scan="ring", timeout=60)
    for dtype, alone in ((torch.float64, True), (torch.bfloat16, False)):
        model = parallelize(make("qwen3_next"), cp, check=False)
        spread = split_experts(model, mesh.context)
        shard_parameters(model, mesh, blocks=model.model.layers, dtype=dtype, methods=(), experts=spread)
        assert all(isinstance(module, FSDPModule) != alone for module in spread)
        assert {p.device_mesh.ndim for module in spread for p in module.parameters()} == {1 if alone else 2}
        assert isinstance(model.model.layers[0], FSDPModule)


def test_experts_that_nothing_is_gathered_of_are_left_alone(ranks):
    """On one replica a rank's experts are whole, with whole gradients: FSDP2 would copy both."""
    ranks.run(4, sharded)


@pytest.mark.parametrize(("name", "ours"), [("qwen3_5_moe", True), ("qwen3_next", True), ("gpt_oss", False)])
def test_gates_are_the_library_s(name, ours, monkeypatch):
    """A SwiGLU goes by our operator; a class with a gate of its own keeps it."""
    from ring_la.integrations.transformers import experts

    module = next(m for m in make(name).modules() if experts.is_experts(m))
    calls, fused = [], experts.swiglu
    monkeypatch.setattr(experts, "swiglu", lambda h: (calls.append(1), fused(h))[1])
    h = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(experts.ExpertProducts(module)._gated(h), module._apply_gate(h))
    assert bool(calls) == ours
