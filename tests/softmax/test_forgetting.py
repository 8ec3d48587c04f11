"""Forgetting attention against the dense fp64 definition: whole, packed, split; FLA's naive function; low precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ring_la
from ring_la import reference
from ring_la.testing.examples import error
from tests.support.pool import group

T, CU = 61, (0, 0, 7, 8, 40, 61)


def tokens(B: int, seed: int = 0, Hk: int = 2) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    x = {"q": draw(B, T, 2, 6), "k": draw(B, T, Hk, 6), "v": draw(B, T, Hk, 5), "g": F.logsigmoid(draw(B, T, 2))}
    return {n: t.requires_grad_() for n, t in x.items()}


def both_ways(function, x, do, **keywords):
    o, lse = function(**x, **keywords)
    of_lse = do.sum(-1).transpose(1, 2).to(lse)
    return [o, lse, *torch.autograd.grad((o * do.to(o)).sum() + (lse * of_lse).sum(), list(x.values()))]


@pytest.mark.parametrize("cu", [None, CU])
@pytest.mark.parametrize("window", [-1, 9])
def test_one_device_is_the_definition(cu, window):
    x = tokens(1 if cu else 2, Hk=1)
    do = torch.randn(x["q"].shape[0], T, 2, 5, dtype=torch.float64)
    keywords = dict(scale=0.3, window=window, cu_seqlens=None if cu is None else torch.tensor(cu))
    got = both_ways(ring_la.forgetting_attention, x, do, **keywords)
    want = both_ways(reference.forgetting_attention, x, do, **keywords)
    assert max(map(error, got, want)) < 1e-10


def split(rank: int, kind: str, cu: tuple[int, ...] | None, strategy: str) -> list[float]:
    cp = ring_la.ContextParallel(group(), scan="ring", attention=strategy)
    layout = cp.layout(T, kind, cu_seqlens=cu)
    x = tokens(1 if cu else 2)
    do = torch.randn(x["q"].shape[0], T, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = both_ways(reference.forgetting_attention, x, do, cu_seqlens=cu)
    local = {n: layout.shard(t.detach()).requires_grad_() for n, t in x.items()}
    got = both_ways(ring_la.forgetting_attention, local, layout.shard(do), layout=layout)
    dims = [1, 2, 1, 1, 1, 1]
    return [error(a, layout.shard(b.detach(), dim)) for a, b, dim in zip(got, want, dims) if a.numel()]


@pytest.mark.parametrize(
    ("P", "kind", "cu", "strategy"),
    [(1, "zigzag", CU, "ring"), (2, "zigzag", CU, "ring"), (2, "contiguous", None, "ulysses"),
     (3, "zigzag", None, "all_gather"), (4, "contiguous", CU, "all_gather"), (4, "zigzag", CU, "ring")],
)  # fmt: skip
def test_split_is_whole(ranks, P, kind, cu, strategy):
    assert max(map(max, ranks.run(P, split, kind, cu, strategy))) < 1e-9


def split_in_bf16(rank: int, strategy: str) -> float:
    cp = ring_la.ContextParallel(group(), scan="ring", attention=strategy)
    layout = cp.layout(T, "zigzag")
    x = {n: t.detach().bfloat16() for n, t in tokens(2).items()} | {"g": tokens(2)["g"].detach().float()}
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    local = {n: layout.shard(t.detach()).requires_grad_() for n, t in x.items()}
    do = torch.randn(2, T, 2, 5, generator=torch.Generator().manual_seed(1))
    want = both_ways(reference.forgetting_attention, leaves, do)[-1]
    return error(
        both_ways(ring_la.forgetting_attention, local, layout.shard(do), layout=layout)[-1], layout.shard(want)
    )


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_gradients_of_sums_travel_whole(ranks, strategy):
    """In bf16 each rank's part of a sum's gradient comes in parts that add up to it."""
    assert max(ranks.run(2, split_in_bf16, strategy)) < 5e-3


def test_long_sums_keep_their_differences_in_bf16():
    """The sums reach −2000, where bf16 has steps of 8: three parts of it hold what two of them differ by."""
    x = {n: t.detach().bfloat16() for n, t in tokens(2).items() if n != "g"}
    g = -33 * torch.ones(2, T, 2)
    g[:, 1::2] = -0.25
    do = torch.randn(2, T, 2, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves = {n: t.requires_grad_() for n, t in (x | {"g": g}).items()}
    got = both_ways(ring_la.forgetting_attention, leaves, do)
    want = both_ways(reference.forgetting_attention, leaves, do)
    o, _, *gradients, dg = map(error, got, want)
    assert max(o, *gradients) < 2e-2
    assert dg < 5e-3


def wrong(x: dict[str, torch.Tensor]):
    """The name that an error has, and what it is of."""
    yield from (("g", x["g"][:, 1:]), ("k", x["k"][:, 1:]), ("q", None), ("k", x["k"].float()))
    yield from ((n, t.to_sparse()) for n, t in x.items())
    yield from ((n, t.to("meta")) for n, t in x.items() if n != "q")
    yield from (("window", (3, 0)), ("window", -2), ("scale", "1"), ("layout", "zigzag"))
    offsets = CU[:-1], (0, 9, 5, T), (1, T)
    yield from (("cu_seqlens", t) for t in (list(CU), torch.tensor(CU).float(), *map(torch.tensor, offsets)))


def test_bad_arguments_are_named():
    x = {n: t.detach() for n, t in tokens(1).items()}
    for name, bad in wrong(x):
        with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected"):
            ring_la.forgetting_attention(**(x | {name: bad}))
    with pytest.raises(ring_la.ArgumentError, match=r"^q: .* heads"):
        ring_la.forgetting_attention(**(x | {"k": x["k"][:, :, :0]}))
