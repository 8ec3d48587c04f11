"""Gradients summed over context ranks are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import gradients, sum_gradients
from tests.support.pool import group


def make() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(19, 16, ["gdn", "attention"], 2)).double()


def check_sum(rank: int, bucket: int) -> None:
    gradients.BUCKET = bucket
    cp, whole, split = ContextParallel(group(), scan="ring"), make(), make()
    ids, layout = torch.arange(23)[None] % 19, cp.layout(23)
    whole.loss(ids).backward()
    split.loss(layout.shard(ids), layout=layout).backward()
    split.norm.weight.requires_grad_(False)
    held = split.embedding.weight.grad
    sum_gradients(split.parameters(), cp)
    assert split.embedding.weight.grad is held  # in place: optimizers and hooks may hold it
    for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
        if name != "norm.weight":
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("bucket", [1, 300, 1 << 25])
def test_they_are_those_of_one_process(ranks, bucket):
    ranks.run(3, check_sum, bucket)


def check_missing(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring")
    ps = [nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, torch.float64, torch.float32)]
    ps[0].grad = torch.full((2,), rank + 1.0)
    if rank == 1:
        ps[1].grad = torch.full((2,), 5.0, dtype=torch.float64)
    sum_gradients(ps, cp)
    assert ps[0].grad.tolist() == [3.0, 3.0]
    assert ps[1].grad.tolist() == [5.0, 5.0]
    assert ps[2].grad is None


def test_a_rank_without_a_gradient_counts_as_zero(ranks):
    ranks.run(2, check_missing)
