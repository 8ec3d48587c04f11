"""`by_block`, and sums that are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ring_la
import ring_la.nn
from ring_la.blockwise import exact_sum
from ring_la.blockwise.linear import _read_of
from tests.support.pool import group


class Gated(nn.Module):
    """A user's own token-wise module: sizes that no vector register divides, a parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.scale = nn.Linear(7, 22), nn.LayerNorm(11), nn.Parameter(torch.rand(11))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return torch.tanh(self.norm(a)) * torch.sigmoid(b) * self.scale


def run(rank: int, P: int, order: tuple[int, ...]) -> list[Tensor]:
    """Of three documents in some order: outputs and gradients of each, and the parameters' gradients."""
    cp, m = ring_la.ContextParallel(group(P), deterministic=True), Gated()
    rng = torch.Generator().manual_seed(0)
    documents = [torch.randn(n, 7, generator=rng) for n in (5, 100, 64)]
    whole = torch.cat([documents[i] for i in order])[None]
    lengths = [len(documents[i]) for i in order]
    layout = cp.layout(169, "zigzag", cu_seqlens=[0, *torch.tensor(lengths).cumsum(0).tolist()])
    x = layout.shard(whole).requires_grad_()
    y = ring_la.by_block(m, x, layout=layout)
    y.square().sum().backward()
    per = [
        torch.cat(layout.gather(t.detach())[0].split(lengths)[i : i + 1])
        for t in (y, x.grad)
        for i in map(order.index, range(3))
    ]
    return per + [cp.comm.all_reduce(p.grad).wait() for p in m.parameters()]


def test_a_module_of_one_s_own(ranks):
    one = ranks.run(1, run, 1, (0, 1, 2))[0]
    for P, order in ((2, (2, 1, 0)), (3, (1, 0, 2)), (4, (0, 1, 2))):
        for some in ranks.run(P, run, P, order):
            assert [torch.equal(a, b) for a, b in zip(one, some, strict=True)] == [True] * len(one)


def check_refusals(rank: int) -> None:
    cp = ring_la.ContextParallel(group(), deterministic=True)
    x = torch.randn(1, 100, 8)
    striped = cp.layout(100, "striped")
    mine = striped.shard(x)
    with pytest.raises(ring_la.UnsupportedError, match=r"^layout: expected runs"):
        ring_la.by_block(torch.sigmoid, mine, layout=striped)
    layout = cp.layout(100)
    with pytest.raises(ring_la.ArgumentError, match=r"^x: expected tensors"):
        ring_la.by_block(torch.sigmoid, torch.ones(3), layout=layout)
    moe = ring_la.nn.MixtureOfExperts(8, 16, experts=2, top_k=1, backend="loop")
    with pytest.raises(ring_la.UnsupportedError, match=r"^backend: expected \"auto\" under a deterministic layout"):
        moe(layout.shard(x), layout=layout)
    moe = ring_la.nn.MixtureOfExperts(8, 16, experts=2, top_k=1)
    moe.experts.out_proj = torch.nn.Sequential(moe.experts.out_proj)  # as an adapter stands around it
    with pytest.raises(
        ring_la.UnsupportedError, match=r"^layout: expected one without deterministic=True for such exp"
    ):
        moe(layout.shard(x), layout=layout)


def test_what_has_no_fixed_bits_is_refused(ranks):
    ranks.run(2, check_refusals)


def summed(rank: int, P: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(24, 50, generator=rng) * 10.0 ** torch.randint(-9, 9, (24, 50), generator=rng)
    layout = ring_la.ContextParallel(group(P), deterministic=True).layout(64)
    return exact_sum(x[torch.randperm(24)][rank::P] if P == 1 else x[rank::P], layout)


def test_sums_have_no_order(ranks):
    one, (four, *_) = ranks.run(1, summed, 1)[0], ranks.run(4, summed, 4)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(24, 50, generator=rng) * 10.0 ** torch.randint(-9, 9, (24, 50), generator=rng)
    assert torch.equal(one, four)
    error = (one - x.double().sum(0)).abs() / x.abs().amax(0)
    assert float(error.max()) < 24 * 2.0**-36


def test_linear_layers_share_what_they_find_of_one_tensor_only():
    """Of the same numbers that a graph has made: another version of them, or what a replayed step may be given anew,
    is looked at again."""
    leaf = torch.ones(2, 3, requires_grad=True)
    x = leaf * 2
    first = _read_of(x)
    assert _read_of(x) is first
    assert _read_of(leaf * 2) is not first
    x.mul_(2)
    assert _read_of(x) is not first
    assert _read_of(leaf) is not _read_of(leaf)
