"""Adapters and all weights on split sequences: gradients of 1, 2 and 3 ranks are those of one process, in fp64."""

from __future__ import annotations

import pytest
import torch

from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import sum_gradients
from tests.support.pool import group

TOKENS = 41
IDS = torch.randint(0, 19, (1, TOKENS), generator=torch.Generator().manual_seed(0))
CU = [0, 6, 30, TOKENS]
TARGETS = r".*layer\.(qkv|out|beta)_proj|blocks\.0\.layer\.(gate|decay)_proj|.*_proj\.[01]|.*router"
EXPERTS = ["up_proj.weight", "out_proj.weight"]


def make(adapters: bool) -> HybridLM:
    torch.manual_seed(0)
    moe = dict(experts=4, top_k=2)
    model = HybridLM(HybridConfig(19, 16, ["gdn", "kda", "attention"], 2, mlp="moe", mlp_options=moe)).double()
    if adapters:
        from peft import LoraConfig, inject_adapter_in_model

        experts = [f"mlp.experts.{name}" for name in EXPERTS]
        config = LoraConfig(r=2, target_modules=TARGETS, target_parameters=experts, init_lora_weights=False)
        model = inject_adapter_in_model(config, model).double()
    return model


def check(rank: int, adapters: bool) -> int:
    """In the pool: how many parameters are trained."""
    whole, split = make(adapters), make(adapters)
    expected = whole.loss(IDS, cu_seqlens=torch.tensor(CU))
    expected.backward()
    cp = ContextParallel(group(), scan="ring")
    layout = cp.layout(TOKENS, cu_seqlens=CU)
    loss = split.loss(layout.shard(IDS), layout=layout)
    loss.backward()
    sum_gradients(split.parameters(), cp)
    torch.testing.assert_close(cp.comm.all_reduce(loss.detach()).wait(), expected.detach(), rtol=1e-12, atol=0)
    trained = [(n, p, q) for (n, p), q in zip(split.named_parameters(), whole.parameters()) if p.requires_grad]
    for name, p, q in trained:
        assert bool(q.grad.any()), name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    return len(trained)


@pytest.mark.parametrize("adapters", [True, False])
def test_gradients_do_not_depend_on_the_split(ranks, adapters):
    if adapters:
        pytest.importorskip("peft")
    trained = {count for P in (1, 2, 3) for count in ranks.run(P, check, adapters)}
    linear, experts = 5 + 7 + 2 + 3, 3 * len(EXPERTS)
    assert trained == {2 * (linear + experts) if adapters else len(list(make(False).parameters()))}
