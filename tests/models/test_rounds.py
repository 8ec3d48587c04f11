"""A sequence worked on in rounds has the loss and the gradient of the whole."""

from __future__ import annotations

import pytest
import torch

from ring_la import ArgumentError, ContextParallel, UnsupportedError
from ring_la.models import HybridConfig, HybridLM
from ring_la.training import TrainingMesh, recompute, shard_parameters
from tests.support.pool import group
from tests.support.sums import summed_gradients

TOKENS = 61
CU = {"one document": None, "packed": [0, 7, 7, 20, 45, 46, 61], "a border on a round's": [0, 20, 40, 61]}


def make(layers=("gdn", "rwkv7", "mamba2")) -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(19, 16, layers, 2, tie_embeddings=False)).double()


def tokens() -> torch.Tensor:
    return torch.randint(0, 19, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def check_rounds(rank: int, cu: list[int] | None, rounds: int) -> None:
    cp, whole, split = ContextParallel(group(), scan="ring"), make(), make()
    expected = whole.loss(tokens(), cu_seqlens=None if cu is None else torch.tensor(cu))
    expected.backward()
    part = recompute(split, ["block"]).loss_in_rounds(tokens(), cp, rounds=rounds, cu_seqlens=cu, chunk=8)
    part.backward()
    torch.testing.assert_close(cp.comm.all_reduce(part.detach()).wait(), expected.detach(), rtol=1e-11, atol=0)
    for (name, grad), q in zip(summed_gradients(split, cp).items(), whole.parameters(), strict=True):
        torch.testing.assert_close(grad, q.grad, rtol=1e-8, atol=1e-11, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("cu", CU.values(), ids=CU)
def test_loss_and_gradient_are_those_of_the_whole(ranks, cu):
    ranks.run(3, check_rounds, cu, 3)


def check_fsdp(rank: int) -> None:
    whole = make()
    whole.loss(tokens()).backward()
    mesh = TrainingMesh.make("cpu")
    split = shard_parameters(recompute(make(), ["block", "norm"], mlp_chunk=3), mesh)
    split.loss_in_rounds(tokens(), ContextParallel(mesh.context, scan="ring"), rounds=4).backward()
    for p, q in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-8, atol=1e-11)


def test_sharded_parameters_get_the_whole_gradient(ranks):
    ranks.run(4, check_fsdp)


def check_refusals(rank: int) -> None:
    cp = ContextParallel(group(), scan="ring")
    with pytest.raises(
        UnsupportedError, match="rounds: expected recurrent layers alone, got a layer of kind 'attention'"
    ):
        make(("gdn", "attention")).loss_in_rounds(tokens(), cp, rounds=2)
    experts = HybridLM(HybridConfig(19, 16, ["gdn"], 2, mlp="moe")).double()
    with pytest.raises(UnsupportedError, match="rounds: expected no auxiliary losses"):
        experts.loss_in_rounds(tokens(), cp, rounds=2)
    for cu in ([0, TOKENS - 1], [1, TOKENS]):
        with pytest.raises(ArgumentError, match="cu_seqlens: expected to "):
            make().loss_in_rounds(tokens(), cp, rounds=2, cu_seqlens=cu)
    for rounds in (0, TOKENS + 1, 1.5):
        with pytest.raises(ArgumentError, match=f"rounds: expected an int from 1 to {TOKENS}"):
            make().loss_in_rounds(tokens(), cp, rounds=rounds)
    with pytest.raises(ArgumentError, match=r"ids: expected an int tensor \[1, T\]"):
        make().loss_in_rounds(tokens().repeat(2, 1), cp, rounds=2)


def test_what_does_not_fit_is_refused(ranks):
    ranks.run(1, check_refusals)
