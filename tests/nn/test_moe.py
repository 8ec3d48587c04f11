"""The mixture of experts: against a loop over dense experts, and its precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ring_la import ArgumentError
from ring_la.nn import MixtureOfExperts

from .moe_cases import DIM, EXPERTS, OPTIONS, gradients, make, same, tokens


def dense(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every expert over every token, weighted by a matrix of mostly zeros; o, auxiliary loss, load."""
    rows = x.reshape(-1, DIM)
    logits = rows @ layer.router.weight.T
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    chosen = torch.zeros_like(p)
    for row, values in enumerate(p.tolist()):
        best = sorted(range(EXPERTS), key=lambda e: -values[e])[: layer.top_k]
        chosen[row, best] = 1
    weights = p * chosen
    if layer.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    out = torch.zeros_like(rows)
    for e in range(EXPERTS):
        gate, up = (rows @ layer.experts.up_proj.weight[e].T).chunk(2, 1)
        out = out + weights[:, e, None] * ((gate * torch.sigmoid(gate) * up) @ layer.experts.out_proj.weight[e].T)
    if layer.shared is not None:
        gate, up = (rows @ layer.shared.up_proj.weight.T).chunk(2, 1)
        shared = (gate * torch.sigmoid(gate) * up) @ layer.shared.out_proj.weight.T
        out = out + (shared if layer.shared_gate is None else shared * torch.sigmoid(layer.shared_gate(rows)))
    load = chosen.mean(0) / layer.top_k
    balance = EXPERTS * sum(load[e] * p[:, e].mean() for e in range(EXPERTS))
    z = logits.exp().sum(1).log().square().mean()
    return out.view(x.shape), layer.balance_coef * balance + layer.z_coef * z, load


@pytest.mark.parametrize("options", OPTIONS)
def test_against_a_loop_over_dense_experts(options):
    ours, theirs = make(**OPTIONS[options]), make(**OPTIONS[options])
    x, y = tokens(2, 13).requires_grad_(), tokens(2, 13).requires_grad_()
    weights = torch.randn_like(x)
    out = ours(x, output_routing=True)
    o, aux, load = dense(theirs, y)
    same(out.o, o)
    same(out.routing.aux_loss, aux)
    same(out.routing.load, load)
    ((out.o * weights).sum() + out.routing.aux_loss).backward()
    ((o * weights).sum() + aux).backward()
    for (name, a), b in zip(gradients(ours, x).items(), gradients(theirs, y).values(), strict=True):
        assert a is not None, name
        same(a, b, name)


def test_balanced_routing_costs_one():
    layer = make(top_k=2, balance_coef=1.0, z_coef=0.0)
    with torch.no_grad():
        layer.router.weight.zero_()
    routing = layer(tokens(1, 4), output_routing=True).routing
    same(routing.aux_loss, torch.ones((), dtype=torch.float64))  # whatever the load, if P is uniform
    same(routing.probability, torch.full((EXPERTS,), 0.2, dtype=torch.float64))


def test_an_expert_without_tokens():
    ours, theirs = make(top_k=2), make(top_k=2)
    x = tokens(2, 9).abs()
    for layer in (ours, theirs):
        with torch.no_grad():
            layer.router.weight[3] = -10.0
    out, (o, aux, _) = ours(x, output_routing=True), dense(theirs, x)
    assert float(out.routing.load[3]) == 0
    same(out.o, o)
    (out.o.square().sum() + out.routing.aux_loss).backward()
    (o.square().sum() + aux).backward()
    assert not ours.experts.up_proj.weight.grad[3].any()
    assert ours.router.weight.grad[3].any()  # its probability still costs
    for (name, a), b in zip(gradients(ours).items(), gradients(theirs).values(), strict=True):
        same(a, b, name)


@pytest.mark.parametrize("T", [0, 1])
def test_few_tokens_give_finite_gradients(T):
    layer, x = make(shared_hidden=4), tokens(2, T).requires_grad_()
    out = layer(x, output_routing=True)
    assert out.o.shape == x.shape
    (out.o.sum() + out.routing.aux_loss).backward()
    assert all(g is not None and g.isfinite().all() for g in gradients(layer, x).values())


def test_shapes_are_found_without_memory():
    x = tokens(2, 3).to("meta")
    assert make(shared_hidden=4).to("meta")(x).o.shape == x.shape


def test_gradients_of_gradients():
    layer = make(top_k=2, shared_hidden=2)

    def both(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(layer, {"router.weight": router}, (x,), {"output_routing": True})
        return out.o, out.routing.aux_loss

    inputs = (tokens(1, 4).requires_grad_(), layer.router.weight.detach().clone().requires_grad_())
    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradgradcheck(both, inputs)


# -- precision ---------------------------------------------------------------------------------------------


def test_the_router_is_fp32():
    """bf16 weights and tokens, inside autocast or not: the fp64 router of the same values picks the same experts."""
    layer, x = make(torch.bfloat16, experts=64, top_k=4), tokens(2, 200, dtype=torch.bfloat16)
    want = F.linear(x.double(), layer.router.weight.double()).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x, output_routing=True)
    for out in (layer(x, output_routing=True), inside):
        assert out.o.dtype == torch.bfloat16
        assert out.routing.probability.dtype == torch.float32
        torch.testing.assert_close(out.routing.probability.double(), want.mean((0, 1)), rtol=1e-5, atol=1e-7)
        load = F.one_hot(want.topk(4, -1).indices, 64).double().mean((0, 1, 2))
        torch.testing.assert_close(out.routing.load.double(), load, rtol=1e-5, atol=1e-7)


def test_bf16_is_as_good_as_a_dense_loop_in_bf16():
    exact, low = make(top_k=2), make(top_k=2).bfloat16()
    with torch.no_grad():
        for p, q in zip(exact.parameters(), low.parameters(), strict=True):
            p.copy_(q)
    x = tokens(1, 100).bfloat16()
    truth = exact(x.double()).o.detach()
    error = lambda o: float((o.detach().double() - truth).norm() / truth.norm())  # noqa: E731
    assert error(low(x).o) <= 2 * error(dense(low, x)[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"dim": 0},
        {"hidden": 0},
        {"experts": 4.0},
        {"top_k": True},
        {"shared_hidden": -1},
        {"balance_coef": float("nan")},
        {"z_coef": None},
        {"renormalize": "no"},
    ],
    ids=str,
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}: expected"):
        MixtureOfExperts(**{"dim": 8, "hidden": 4, "experts": 4, **wrong})
