"""Recomputation keeps less and changes no gradient; what it cannot do it refuses."""

from __future__ import annotations

import pytest
import torch

from ring_la import ArgumentError, ContextParallel, UnsupportedError
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import LAYERS
from ring_la.softmax.plan import AttentionMoves
from ring_la.training import Offload, recompute
from tests.support.gpu import on_gpus
from tests.support.pool import group
from tests.support.sums import summed_gradients

IDS = torch.arange(64)[None] % 19


def make(**changes) -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(19, 16, ["gdn", "attention"], 2, **changes)).double()


def measured(model: HybridLM) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept for the backward pass (each storage once), and all gradients."""
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(IDS)
    size = sum(kept.values())
    loss.backward()
    return size, [p.grad for p in model.parameters()]


def test_each_kind_keeps_less_and_gradients_stay():
    before, expected = measured(make())
    names = [name for name, _ in make().named_parameters()]
    for kinds, chunk in ((["norm"], None), (["gdn"], None), (["attention"], None), (["mlp"], None), ([], 10)):
        model = recompute(make(), kinds, mlp_chunk=chunk)
        assert [name for name, _ in model.named_parameters()] == names
        size, grads = measured(model)
        assert size < 0.97 * before, (kinds, chunk)
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    least = measured(recompute(make(), ["block", "norm"]))[0]
    everything = measured(recompute(make(), ["gdn", "attention", "mlp", "norm"]))[0]
    assert least < everything < before / 2


@pytest.mark.parametrize("kinds", [["block", "norm"], ["gdn", "attention", "mlp", "norm"]])
def test_nothing_is_computed_a_third_time(kinds):
    """What lies within something recomputed is not wrapped once more."""
    model, calls = make(), dict.fromkeys(("layer_norm", "mlp_norm", "mlp", "layer"), 0)
    for name in calls:
        part, forward = getattr(model.blocks[0], name), getattr(model.blocks[0], name).forward

        def counted(*args, name=name, forward=forward, **keywords):
            calls[name] += 1
            return forward(*args, **keywords)

        part.forward = counted
    recompute(model, kinds).loss(IDS).backward()
    assert max(calls.values()) == 2, calls


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_layer_is_computed_twice(name):
    """Gradients that a forward pass takes by itself (of what reads the other side of a state) ask for nothing again."""
    torch.manual_seed(0)
    model, calls = HybridLM(HybridConfig(19, 16, [name], 2)).double(), []
    layer, forward = model.blocks[0].layer, model.blocks[0].layer.forward
    layer.forward = lambda *args, **keywords: (calls.append(torch.is_grad_enabled()), forward(*args, **keywords))[1]
    recompute(model, ["block"]).loss(IDS).backward()
    assert len(calls) == 2, calls


@pytest.mark.parametrize("keep", [False, True])
def test_chunks_within_a_recomputed_block_are_computed_again_once(keep):
    """The block's recomputation needs no chunk's result: each is computed forward, and for its own backward pass."""
    _, expected = measured(make())
    model, rows = make(), []
    mlp, forward = model.blocks[0].mlp, model.blocks[0].mlp.forward
    mlp.forward = lambda x, **keywords: (rows.append(x.shape[1]), forward(x, **keywords))[1]
    _, grads = measured(recompute(model, ["block", "norm"], mlp_chunk=10, keep_attention=keep))
    assert sum(rows) == 2 * 64, rows
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("error", "kinds", "chunk", "changes", "message"),
    [
        (ArgumentError, ["mlps"], None, {}, "kinds: expected 'mlp', 'block', 'norm' or names"),
        (ArgumentError, ["mlp"], 0, {}, "mlp_chunk: expected an int ≥ 1"),
        (UnsupportedError, ["mlp"], 8, {"mlp": "moe"}, "mlp_chunk: expected None with a mixture of experts"),
    ],
)
def test_what_does_not_fit_is_refused(error, kinds, chunk, changes, message):
    with pytest.raises(error, match=message):
        recompute(make(**changes), kinds, mlp_chunk=chunk)


@pytest.mark.parametrize("kinds", [["block", "norm"], ["attention"]])
def test_results_of_attention_are_kept(kinds, monkeypatch):
    """Its kernel runs once forward, the gradients stay, and what is kept is o and lse more; a second pass, too."""
    _, expected = measured(make())
    calls, forward = [], AttentionMoves.forward
    monkeypatch.setattr(AttentionMoves, "forward", lambda self, x: (calls.append(1), forward(self, x))[1])
    model = recompute(make(), kinds, keep_attention=True)
    with Offload(least=0) as offload:
        loss = model.loss(IDS)
    assert len(calls) == 1
    moved = offload.moved
    with Offload(least=0) as offload:
        recompute(make(), kinds).loss(IDS)
    assert moved - offload.moved == 64 * 16 * 8 + 64 * 2 * 8
    assert len(calls) == 2
    loss.backward(retain_graph=True)
    for p, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, theirs, rtol=1e-12, atol=1e-14)
        p.grad = None
    loss.backward()
    for p, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, theirs, rtol=1e-12, atol=1e-14)
    assert len(calls) == 2


def check_recomputed(rank: int, keep: bool) -> None:
    """A split model whose blocks are recomputed, or all but attention's results, beside the whole one."""
    cp = ContextParallel(group(), scan="ring", attention="ring")
    cu, ids = [0, 5, 40, 64], (torch.arange(64) % 19)[None]
    layout = cp.layout(64, "zigzag", cu_seqlens=cu)

    def made() -> HybridLM:
        torch.manual_seed(0)
        return HybridLM(HybridConfig(19, 16, ["gdn", "attention"], 2)).double()

    whole, split = made(), recompute(made(), ["block", "norm"], keep_attention=keep)
    want = whole.loss(ids, cu_seqlens=torch.tensor(cu))
    want.backward()
    got = split.loss(layout.shard(ids), layout=layout)
    got.backward()
    torch.testing.assert_close(cp.comm.all_reduce(got.detach()).wait(), want.detach())
    for grad, q in zip(summed_gradients(split, cp).values(), whole.parameters(), strict=True):
        torch.testing.assert_close(grad, q.grad, rtol=1e-9, atol=1e-12)


KEPT = pytest.mark.parametrize("keep", [False, True], ids=["all", "all but attention"])


@KEPT
def test_blocks_of_a_split_model(ranks, keep):
    ranks.run(2, check_recomputed, keep)


@pytest.mark.gpu
@KEPT
def test_blocks_of_a_split_model_on_gpus(gpu_ranks, keep):
    on_gpus(gpu_ranks, 2, check_recomputed, keep)


def test_another_model_is_refused():
    with pytest.raises(ArgumentError, match=r"model: expected a HybridLM .*, got Linear"):
        recompute(torch.nn.Linear(2, 2), ["mlp"])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("kinds", {"kinds": "gdn"}),
        ("kinds", {"kinds": None}),
        ("mlp_chunk", {"mlp_chunk": 1.5}),
        ("mlp_chunk", {"mlp_chunk": True}),
        ("keep_attention", {"keep_attention": "no"}),
    ],
)
def test_what_is_recomputed_is_checked(name, wrong):
    model = HybridLM(HybridConfig(9, 8, ["gdn"], 2))
    with pytest.raises(ArgumentError, match=f"{name}: expected"):
        recompute(model, **{"kinds": ["gdn"], **wrong})
