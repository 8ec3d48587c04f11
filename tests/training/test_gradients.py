"""Gradients summed over context ranks are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ring_la
from ring_la import ContextParallel
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import clip_gradients, gradients, sum_gradients
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


def check_wrong(rank: int) -> list[str]:
    cp, model = ContextParallel(group(), scan="ring"), nn.Linear(3, 2)
    gone = model.parameters()
    assert len([*gone]) == 2
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.ones(2)
    fewer = [model.weight, model.bias][rank:]
    turned = [model.weight, model.bias][:: 1 - 2 * rank]
    with pytest.raises(ring_la.ArgumentError, match=r"parameters: expected at least one, got none\. What"):
        sum_gradients(gone, cp)
    with pytest.raises(ring_la.ArgumentError, match=r"parameters: expected parameters, .* got Linear"):
        sum_gradients(model, cp)
    with pytest.raises(ring_la.ArgumentError, match="parameters: expected at least one"):
        clip_gradients(gone, 1.0)
    with pytest.raises(ring_la.ArgumentError, match="most: expected a norm above 0"):
        clip_gradients(model.parameters(), -1.0)
    said = []
    for different in (fewer, turned):
        with pytest.raises(ring_la.DisagreementError) as error:
            sum_gradients(different, cp)
        said.append(str(error.value))
    sum_gradients(model.parameters(), cp)
    assert model.bias.grad.tolist() == [2.0, 2.0]
    return said


def test_wrong_parameters_are_named_on_every_rank(ranks):
    said = ranks.run(2, check_wrong)
    assert said[0] == said[1]
    assert "rank 0: 2, hash" in said[0][0]
    assert "rank 1: 1, hash" in said[0][0]


@pytest.mark.parametrize("wrong", ["tensor", "named", "number"])
def test_what_would_clip_nothing_is_refused(wrong):
    """A tensor was gone through row by row, none of which has a gradient: the norm was 0."""
    model = nn.Linear(3, 2)
    model.weight.grad = torch.ones(2, 3)
    given = {"tensor": model.weight, "named": model.named_parameters(), "number": 3}[wrong]
    with pytest.raises(ring_la.ArgumentError, match=r"parameters: expected parameters, such as model.parameters\(\)"):
        clip_gradients(given, 1.0)
    for most in ("1", None, True, float("nan")):
        with pytest.raises(ring_la.ArgumentError, match="most: expected a norm above 0"):
            clip_gradients(model.parameters(), most)
