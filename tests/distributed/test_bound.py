"""``layout.bind(model)``: mistakes that no single call can know of, each an error on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ring_la import ArgumentError, ContextParallel, DisagreementError
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import GatedDeltaNet
from tests.support.pool import group

T, D = 36, 16


class Mixing(nn.Module):
    """Two layers, of which the caller gives the second no layout, and perhaps a module that looks at neighbours."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = GatedDeltaNet(D, 2), GatedDeltaNet(D, 2)
        self.between = nn.Identity() if between is None else between

    def forward(self, x: Tensor, layout: object = None) -> Tensor:
        x = self.first(x, layout=layout).o
        return self.second(self.between(x)).o


class Means(nn.Module):
    """Brings every token the mean of all that are there."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def made(kind: type[nn.Module] = Mixing, *args: nn.Module) -> tuple[nn.Module, Tensor]:
    """A model and a sequence, the same on every rank."""
    torch.manual_seed(0)
    return kind(*args).double(), torch.randn(1, T, D, dtype=torch.float64)


def refused(call, *, kind: type[Exception] = ArgumentError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def check_mistakes(rank: int) -> dict[str, str]:
    cp = ContextParallel(group(), scan="ring")
    layout, other = cp.layout(T), cp.layout(T, "contiguous")
    model, x = made()
    whole, said = Mixing.forward(model, x), {}
    forgotten = layout.gather(model(layout.shard(x), layout=layout))
    with layout.bind(model) as bound:
        torch.testing.assert_close(layout.gather(model(layout.shard(x))), whole)
        torch.testing.assert_close(layout.gather(model(layout.shard(x), layout)), whole)
        bound.compare(x)
        said["other tokens"] = refused(lambda: model(other.shard(x)))
        said["other layout"] = refused(lambda: model.first(layout.shard(x), layout=other))
        said["None"] = refused(lambda: model.first(layout.shard(x), layout=None))
        said["whole"] = refused(lambda: model(x if rank == 1 else layout.shard(x)), kind=DisagreementError)
        said["data"] = refused(lambda: model(layout.shard(x + rank)), kind=DisagreementError)
        said["gather"] = refused(lambda: other.gather(model(layout.shard(x))))
    assert not torch.allclose(forgotten, whole), "without bind a forgotten layout is not seen"
    torch.testing.assert_close(layout.gather(model(layout.shard(x), layout=layout)), forgotten)
    model, x = made(Mixing, Means())
    with layout.bind(model) as bound:
        said["mixing"] = refused(lambda: bound.compare(x))
    return said


def test_mistakes_are_named_on_every_rank(ranks):
    here, there = ranks.run(2, check_mistakes)
    zigzag, contiguous = (f"seq_len=36, kind={kind}, cu_seqlens=[0, 36]" for kind in ("zigzag", "contiguous"))
    assert here["other tokens"].startswith(
        f"x: expected a tensor split by the layout of {zigzag}, multiple_of=1, got one"
    )
    bound = (
        f"layout: expected the layout that the model is bound to, {zigzag}, multiple_of=1, for first (GatedDeltaNet)"
    )
    assert here["other layout"].startswith(f"{bound}, got that of {contiguous}")
    assert here["None"] == f"{bound}, got None"
    assert "rank 1: refused: x: expected this rank's tokens for a model bound to a layout, got all 36" in here["whole"]
    assert here["whole"] == there["whole"]
    assert "what x was cut from" in here["data"]
    assert "the same whole sequence: they share a seed and a sampler" in here["data"]
    assert f"got one split by the layout of {zigzag}" in here["gather"]
    assert f"expected a tensor split by the layout of {contiguous}" in here["gather"]
    assert "between (Means), the first whose results differ" in here["mixing"]
    assert here["mixing"] == there["mixing"]


def check_packed(rank: int) -> None:
    """Documents, and a model whose root takes a layout."""
    cp = ContextParallel(group(), scan="ring")
    layout = cp.layout(T, cu_seqlens=[0, 9, 30, T])
    model = HybridLM(HybridConfig(11, D, ["gdn", "attention"], 2)).double()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    ids = torch.arange(T)[None] % 11
    with layout.bind(model) as bound:
        bound.compare(ids)
        model.loss(layout.shard(ids), layout=layout).backward()
        assert "layout that the model is bound to" in refused(lambda: model.loss(layout.shard(ids)))
    assert model.blocks[0].layer(torch.zeros(1, 5, D, dtype=torch.float64)).o.shape == (1, 5, D), "free again"
    assert layout.bindings == 0


def test_a_packed_model_of_ours(ranks):
    ranks.run(3, check_packed)
