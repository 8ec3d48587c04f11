"""The mixture of experts on a split sequence, whose statistics are the whole one's; compiled, replayed, in a model."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_la import ArgumentError, ContextParallel, RingLAError
from ring_la.inference import decode, prefill
from ring_la.models import HybridConfig, HybridLM
from tests.support.gpu import on_gpus
from tests.support.pool import group
from tests.support.sums import summed_gradients

from .moe_cases import COEFFICIENTS, DIM, EXPERTS, HIDDEN, gradients, make, same, tokens

CU = [0, 3, 3, 20, 37]
SPLITS = {
    "contiguous": (37, "contiguous", None),
    "zigzag": (37, "zigzag", None),
    "packed": (37, "zigzag", CU),
    "ranks without tokens": (3, "contiguous", None),
    "one token": (1, "zigzag", None),
}
MODEL = HybridConfig(
    vocab_size=11,
    dim=DIM,
    layers=["gdn", "attention"],
    num_heads=2,
    mlp="moe",
    mlp_dim=HIDDEN,
    mlp_options={"experts": EXPERTS, "top_k": 2, "shared_hidden": 4, "shared_gate": True, **COEFFICIENTS},
)


def make_model(**changes) -> HybridLM:
    torch.manual_seed(0)
    options = MODEL.to_dict()
    options["mlp_options"] |= changes
    model = HybridLM(HybridConfig(**options)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def ids_of(T: int, batch: int) -> Tensor:
    return torch.randint(11, (batch, T), generator=torch.Generator(torch.get_default_device()).manual_seed(3))


@functools.cache
def whole(T: int, cu: tuple[int, ...] | None):
    """Loss, gradients and routings of one process."""
    model, routings = make_model(), []
    offsets = None if cu is None else torch.tensor(cu)
    loss = model.loss(ids_of(T, 1 if cu else 2), cu_seqlens=offsets, routings=routings)
    loss.backward()
    return loss.detach(), gradients(model), routings


def check_split(rank: int, T: int, kind: str, cu: list[int] | None) -> None:
    cp = ContextParallel(group(), scan="ring")
    layout = cp.layout(T, kind=kind, cu_seqlens=cu)
    want, grads, statistics = whole(T, None if cu is None else tuple(cu))
    model, routings = make_model(), []
    part = model.loss(layout.shard(ids_of(T, 1 if cu else 2)), layout=layout, routings=routings)
    part.backward()
    same(cp.comm.all_reduce(part.detach()).wait(), want, "loss")
    assert all(p.grad is not None for p in model.parameters())
    for name, grad in summed_gradients(model, cp).items():
        same(grad, grads[name], name)
    for ours, theirs in zip(routings, statistics, strict=True):
        same(ours.load, theirs.load, "load")
        same(ours.probability, theirs.probability, "probability")
        same(cp.comm.all_reduce(ours.aux_loss.detach()).wait(), theirs.aux_loss.detach(), "aux_loss")


@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_every_gradient_equal_one_process(ranks, split, P):
    ranks.run(P, check_split, *SPLITS[split])


@pytest.mark.gpu
@pytest.mark.parametrize("P", [2, 4])
def test_loss_and_every_gradient_on_gpus(gpu_ranks, P):
    on_gpus(gpu_ranks, P, check_split, *SPLITS["packed"])


def test_the_auxiliary_loss_is_part_of_the_loss():
    """Else the test above would not see it."""
    ids, one = ids_of(20, 2), make_model()
    none, routings = make_model(balance_coef=0.0, z_coef=0.0), []
    loss = one.loss(ids, routings=routings)
    same(loss, none.loss(ids) + sum(r.aux_loss for r in routings))
    assert len(routings) == len(MODEL.layers)
    assert all(float(r.aux_loss.detach()) > 0.5 for r in routings)


def check_whole_statistics(rank: int) -> tuple[list, list, float]:
    """Tokens that all like the expert of their own rank: a shard's own statistics would be one-sided."""
    cp = ContextParallel(group(), scan="ring")
    layout = cp.layout(5, "contiguous")  # ranks have 3 and 2 tokens
    layer = make(experts=2, top_k=1, renormalize=False, balance_coef=1.0, z_coef=0.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = torch.tensor([-1.0, 1.0])
    x = torch.zeros(1, 5, DIM, dtype=torch.float64)
    x[0, :, 0] = torch.tensor([-1.0, -1, -1, 1, 1])
    sent = cp.comm.bytes_sent
    layer(layout.shard(x), layout=layout)
    assert cp.comm.bytes_sent == sent, "without output_routing nothing travels"
    routing = layer(layout.shard(x).requires_grad_(), output_routing=True, layout=layout).routing
    assert 0 < cp.comm.bytes_sent - sent <= 2 * 2 * 8
    sent = cp.comm.bytes_sent
    routing.aux_loss.backward()
    assert cp.comm.bytes_sent == sent, "the backward pass exchanges nothing"
    return routing.load.tolist(), routing.probability.tolist(), float(routing.aux_loss.detach())


def test_statistics_are_of_the_whole_sequence(ranks):
    results = ranks.run(2, check_whole_statistics)
    high = 1 / (1 + torch.tensor(-2.0, dtype=torch.float64).exp())
    P0 = float(0.6 * high + 0.4 * (1 - high))
    for load, probability, _ in results:
        assert load == pytest.approx([0.6, 0.4])
        assert probability == pytest.approx([P0, 1 - P0])
    assert sum(aux for *_, aux in results) == pytest.approx(2 * (0.6 * P0 + 0.4 * (1 - P0)))


def check_replay(rank: int) -> None:
    """Blocks replayed in the backward pass, their exchanges with them."""
    cp = ContextParallel(group(), scan="ring")
    layout = cp.layout(37)
    _, grads, _ = whole(37, None)
    model = make_model()
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    model.loss(layout.shard(ids_of(37, 2)), layout=layout).backward()
    found = summed_gradients(model, cp)
    assert found.keys() == grads.keys()
    for name, grad in found.items():
        same(grad, grads[name], name)


def test_checkpointed_blocks(ranks):
    ranks.run(2, check_replay)


def check_refusals(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring", timeout=60)
    layer, layout = make(), cp.layout(37)
    with pytest.raises(RingLAError, match="x: expected this rank's tokens with a layout, got all 37"):
        layer(tokens(1, 37), layout=layout)
    with pytest.raises(RuntimeError, match="rank 0: refused: x: expected a float tensor"):  # every rank hears of it
        layer(layout.shard(tokens(1, 37))[0] if rank == 0 else layout.shard(tokens(1, 37)), layout=cp.layout(37))
    with pytest.raises(RingLAError, match="MixtureOfExperts"):
        layer(layout.shard(tokens(1, 37)), layout=layout, output_routing=rank == 0)


def test_wrong_calls_are_refused_on_every_rank(ranks):
    ranks.run(2, check_refusals)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"top_k": 6}, "top_k: expected an int from 1 to experts = 5"),
        ({"top_k": 0}, "top_k"),
        ({"balance_coef": -1.0}, "balance_coef: expected a finite number ≥ 0"),
        ({"shared_gate": True}, "Give shared_hidden"),
    ],
)
def test_wrong_options_are_named(options, match):
    with pytest.raises(ArgumentError, match=match):
        make(**options)


# -- compiled ----------------------------------------------------------------------------------------------


def test_compiled_whole_for_any_number_of_tokens():
    """No graph break, so nothing is read by the host; one graph serves all lengths."""
    layer, graphs = make(shared_hidden=4, shared_gate=True), []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for T in (13, 40, 7):
        results = []
        for run in (compiled, layer):
            x = tokens(2, T).requires_grad_()
            layer.zero_grad()
            out = run(x, output_routing=True)
            (out.o.square().sum() + out.routing.aux_loss).backward()
            results.append([out.o, *out.routing, *(g.clone() for g in gradients(layer, x).values())])
        for a, b in zip(*results, strict=True):
            same(a, b)
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_models_loss_compiles_whole():
    torch._dynamo.reset()
    model, ids = make_model(), ids_of(20, 2)
    results = []
    for loss in (torch.compile(model.loss, fullgraph=True, backend="aot_eager"), model.loss):
        model.zero_grad()
        value = loss(ids)
        value.backward()
        results.append([value, *(g.clone() for g in gradients(model).values())])
    for a, b in zip(*results, strict=True):
        same(a, b)


def check_compiled(rank: int) -> None:
    """Under a layout the graph breaks at the exchange; the result is the same."""
    cp = ContextParallel(group(), scan="ring")
    layer, layout = make(), cp.layout(37)
    x = layout.shard(tokens(2, 37))
    torch._dynamo.reset()
    out = torch.compile(layer, backend="aot_eager")(x, output_routing=True, layout=layout)
    want = layer(x, output_routing=True, layout=layout)
    same(out.o, want.o)
    for a, b in zip(out.routing, want.routing, strict=True):
        same(a, b)
    (out.o.sum() + out.routing.aux_loss).backward()


def test_compiled_under_a_layout(ranks):
    ranks.run(2, check_compiled)


# -- in a model --------------------------------------------------------------------------------------------


def test_the_configuration_survives_a_round_trip():
    again = HybridConfig(**MODEL.to_dict())
    assert again.to_dict() == MODEL.to_dict()
    assert again.mlp_options["experts"] == EXPERTS


def check_prompt(rank: int) -> list[int]:
    cp = ContextParallel(group(), scan="ring")
    layout, model = cp.layout(21), make_model()
    prompt = prefill(model, layout.shard(ids_of(21, 2)), layout=layout)
    return torch.stack(list(decode(model, prompt, 5)), 1).tolist()


def test_a_split_prompt_continues_as_a_whole_one(ranks):
    model, ids = make_model(), ids_of(21, 2)
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert ranks.run(2, check_prompt) == [ids[:, 21:].tolist()] * 2
