"""Indexers, whole and split, against loops over tokens: what is chosen, the loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.indexers import best_key_index, block_index, chosen, full_block_index, lightning_index, lightning_loss
from tests.support.pool import group
from tests.support.split_attention import KINDS

T, CU, HEADS, D, TOPK = 41, (0, 6, 6, 7, 30, 41), 3, 5, 4


def draw(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = dict(q=(1, T, HEADS, D), k=(1, T, D), w=(1, T, HEADS), aq=(1, T, 4, 8), ak=(1, T, 2, 8))
    x = {n: torch.randn(*shape, generator=rng, dtype=torch.float64) for n, shape in shapes.items()}
    x["k"], x["w"] = x["k"].abs(), x["w"].abs()
    x["q"][:, :, 0] = x["q"][:, :, 0].abs()  # no score is 0, as others might be too
    return x


def start_of(t: int) -> int:
    return max(a for a, b in zip(CU, CU[1:]) if a <= t < b)


def scores(x: dict[str, Tensor], t: int) -> Tensor:
    """I of query t and each token of its document up to it."""
    keys = x["k"][0, start_of(t) : t + 1]
    return sum(x["w"][0, t, h] * torch.relu(keys @ x["q"][0, t, h]) for h in range(HEADS))


def picked(x: dict[str, Tensor]) -> list[set[int]]:
    best = [scores(x, t) for t in range(T)]
    return [set((s.topk(min(TOPK, len(s))).indices + start_of(t)).tolist()) for t, s in enumerate(best)]


def loss_of(x: dict[str, Tensor], chosen: list[set[int]]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for t, keys in enumerate(chosen):
        at = sorted(keys)
        heads = [torch.softmax(x["ak"][0, at, h // 2] @ x["aq"][0, t, h] * 8**-0.5, 0) for h in range(4)]
        p = (sum(heads) / 4).detach()
        log = torch.log_softmax(scores(x, t)[[j - start_of(t) for j in at]], 0)
        total = total + (p * (p.log() - log)).sum()
    return total


def leaves(x: dict[str, Tensor]) -> list[Tensor]:
    return [x[n].requires_grad_() for n in ("q", "k", "w")]


def sets(places: Tensor) -> list[set[int]]:
    return [{j for j in row if j >= 0} for row in places[0, :, 0].tolist()]


@pytest.fixture
def few(monkeypatch):
    """Some scores at a time."""
    monkeypatch.setattr(chosen, "SCORES", 120)
    monkeypatch.setattr(chosen, "CHUNK", 7)


def lse_of(x: dict[str, Tensor], places: Tensor, **where) -> Tensor:
    """What attention to a choice gives."""
    return ring_la.sparse_attention(x["aq"], x["ak"], x["ak"], places, **where).lse


def test_lightning_on_one_device_is_the_loop(few):
    x, cu = draw(), torch.tensor(CU)
    out = lightning_index(x["q"], x["k"], x["w"], TOPK, cu_seqlens=cu)
    assert sets(out.places) == picked(x)
    assert (out.scores.diff(dim=-1) <= 0).logical_or(torch.isneginf(out.scores[..., 1:])).all()
    want = loss_of(x, picked(x))
    got = lightning_loss(*leaves(x), out.places, x["aq"], x["ak"], cu_seqlens=cu)
    torch.testing.assert_close(got, want)
    given = lightning_loss(
        *leaves(x), out.places, x["aq"], x["ak"], attention_lse=lse_of(x, out.places, cu_seqlens=cu), cu_seqlens=cu
    )
    torch.testing.assert_close(given, want)
    pairs = zip(torch.autograd.grad(got, leaves(x)), torch.autograd.grad(loss_of(x, picked(x)), leaves(x)))
    assert all(torch.allclose(a, b) for a, b in pairs)


def check_lightning(rank: int, P: int) -> bool:
    cp, x = ring_la.ContextParallel(group(P), scan="ring"), draw()
    places, inputs = picked(x), leaves(x)
    want = torch.autograd.grad(loss_of(x, places), inputs)
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=CU)
        local = {n: layout.shard(t.detach()) for n, t in x.items()}
        out = lightning_index(local["q"], local["k"], local["w"], TOPK, layout=layout)
        assert sets(out.places) == [places[t] for t in layout.tokens().tolist()]
        given = lse_of(local, out.places, layout=layout) if kind == "zigzag" else None
        loss = lightning_loss(*leaves(local), out.places, local["aq"], local["ak"], attention_lse=given, layout=layout)
        torch.testing.assert_close(cp.comm.all_reduce(loss.detach().clone()).wait(), loss_of(x, places).detach())
        for got, whole in zip(torch.autograd.grad(loss, leaves(local)), want):
            torch.testing.assert_close(got, layout.shard(whole))
    return True


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_split_lightning_is_whole(ranks, P):
    assert all(ranks.run(P, check_lightning, P))


SIZE = 4


def blocks_picked(q: Tensor, k: Tensor, g: int) -> list[set[int]]:
    """The own block of each token and the best of those before it, by their first tokens."""
    out = []
    for t in range(T):
        first, end = start_of(t), next(b for b in CU if b > t)
        own = t - (t - first) % SIZE
        of_heads = q[0, t, 2 * g : 2 * g + 2].sum(0)
        score = {a: float(k[0, a : min(a + SIZE, end), g].mean(0) @ of_heads) for a in range(first, own, SIZE)}
        out.append({own, *sorted(score, key=score.get, reverse=True)[: TOPK - 1]})
    return out


def check_blocks(rank: int, P: int) -> bool:
    cp, x = ring_la.ContextParallel(group(P), scan="ring"), draw()
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=CU)
        places = block_index(layout.shard(x["aq"]), layout.shard(x["ak"]), SIZE, TOPK, layout=layout).places
        for g in range(2):
            want = blocks_picked(x["aq"], x["ak"], g)
            assert sets(places[:, :, g : g + 1]) == [want[t] for t in layout.tokens().tolist()]
    return True


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_blocks_are_the_loop(ranks, P):
    assert all(ranks.run(P, check_blocks, P))


INDEXERS = {
    lightning_index: dict(topk=2),
    block_index: dict(size=SIZE, topk=2),
    full_block_index: dict(size=SIZE, topk=2),
    best_key_index: dict(size=SIZE, topk=2),
    lightning_loss: {},
}
"""Each with what it takes beside its tensors."""


def wrong(function: Callable, x: dict[str, Tensor], given: dict) -> dict[str, list]:
    """Wrong values of each argument of a call."""
    q, k = given["q"], given["k"]
    found = dict(q=[None, q[0]], k=[k[..., :2], k[:, :-1], k.long()], layout=["zigzag"], cu_seqlens=[torch.tensor(CU)])
    found |= {name: [0, True, 1.5] for name in ("topk", "size") if name in given}
    if "w" in given:
        found |= dict(w=[x["k"], None], k=[*found["k"], k.half()])
    if function is lightning_loss:
        found |= dict(
            attention_lse=[x["q"]],
            chosen=[given["chosen"].double(), None],
            attention_q=[x["q"][0]],
            attention_k=[x["q"], None],
        )
    return found


def call_of(function: Callable, x: dict[str, Tensor]) -> dict:
    """The arguments of a call on some tokens."""
    if function is block_index:
        given = dict(q=x["aq"], k=x["ak"])
    else:
        given = dict(q=x["q"], k=x["k"]) | (dict(w=x["w"]) if "lightning" in function.__name__ else {})
    if function is lightning_loss:
        chosen = torch.zeros(*x["q"].shape[:2], 1, 3, dtype=torch.int32)
        given |= dict(chosen=chosen, attention_q=x["aq"], attention_k=x["ak"])
    return given | INDEXERS[function]


def check_refusals(rank: int) -> list[str]:
    """What rank 1 alone does wrong every rank is told by the argument's name."""
    cp, missed = ring_la.ContextParallel(group(), scan="ring", timeout=60.0), []
    x = {n: cp.layout(T).shard(t) for n, t in draw().items()}
    for function in INDEXERS:
        given = call_of(function, x)
        for name, values in wrong(function, x, given).items():
            for value in values if rank == 1 else [given.get(name)] * len(values):
                layout = cp.layout(T)  # on which no call was compared before, so that nobody goes ahead
                if name == "layout":  # without one a rank is by itself
                    value = "zigzag"
                try:
                    function(**dict(layout=layout) | given | {name: value})
                    missed.append(f"{function.__name__} takes {name}={value!r}")
                except (ring_la.ArgumentError, ring_la.DisagreementError) as error:
                    if f"{name}: " not in str(error) and not (name == "q" and "k: " in str(error)):
                        missed.append(f"{function.__name__}({name}=): {error}")
    return missed


def test_what_one_rank_does_wrong_all_refuse_by_name(ranks):
    assert ranks.run(2, check_refusals) == [[], []]


def check_pool(rank: int) -> None:
    layout, x = ring_la.ContextParallel(group(2), scan="ring").layout(T, cu_seqlens=CU), draw()
    q, k, refused = layout.shard(x["q"]), layout.shard(x["k"]), (ring_la.ArgumentError, ring_la.DisagreementError)
    for wrong in (lambda means, first: means[:, :1], 3, lambda means, first: None):
        pool = wrong if rank else lambda means, first: means
        with pytest.raises(refused, match="pool: expected None or a function"):
            full_block_index(q, k, SIZE, TOPK, pool=pool, layout=layout)


def test_a_pool_that_makes_something_else_is_refused(ranks):
    """One row of means for all blocks was spread over them."""
    ranks.run(2, check_pool, timeout=30)


def test_the_loss_passes_over_places_that_there_are_not():
    rng = torch.Generator().manual_seed(0)
    q, k, w, aq, ak = (torch.randn(1, 6, *s, generator=rng) for s in ((2, 4), (4,), (2,), (2, 4), (1, 4)))
    chosen = torch.arange(6)[:, None] - torch.arange(4)
    far = torch.where(chosen < 0, 1 << 40, chosen)[None, :, None]
    assert torch.equal(lightning_loss(q, k, w, far, aq, ak), lightning_loss(q, k, w, chosen[None, :, None], aq, ak))
    with pytest.raises(ring_la.ArgumentError, match=r"^attention_k: "):
        lightning_loss(q, k, w, far, aq, ak[:, :, :0])


def full_blocks(x: dict[str, Tensor]) -> list[set[int]]:
    """QSA: the best full blocks up to each token, and its own where that is not full."""
    out = []
    for t in range(T):
        first = start_of(t)
        keys = {a: x["k"][0, a : a + SIZE].mean(0) * a for a in range(first, t + 2 - SIZE, SIZE)}
        score = {a: float(torch.relu(x["q"][0, t] @ m).sum()) for a, m in keys.items()}
        own = set() if (t - first + 1) % SIZE == 0 else {t - (t - first) % SIZE}
        out.append(own | set(sorted(score, key=score.get, reverse=True)[:TOPK]))
    return out


def check_full_blocks(rank: int, P: int) -> bool:
    cp, x = ring_la.ContextParallel(group(P), scan="ring"), draw()
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=CU)
        how = dict(pool=lambda means, first: means * first[:, None], layout=layout)
        places = full_block_index(layout.shard(x["q"]), layout.shard(x["k"]), SIZE, TOPK, **how).places
        want = full_blocks(x)
        assert sets(places) == [want[t] for t in layout.tokens().tolist()]
    return True


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_full_blocks_are_the_loop(ranks, P):
    assert all(ranks.run(P, check_full_blocks, P))


def best_keys(x: dict[str, Tensor], h: int) -> list[set[int]]:
    """MiniMax-M3: the blocks of two local ones and the best single keys up to each token."""
    out = []
    for t in range(T):
        first = start_of(t)
        own = t - (t - first) % SIZE
        score = {}
        for a in range(first, own + 1, SIZE):
            score[a] = float((x["k"][0, a : min(a + SIZE, t + 1)] @ x["q"][0, t, h]).max())
        near = {a for a in (own, own - SIZE) if a >= first}
        rest = sorted(set(score) - near, key=score.get, reverse=True)
        out.append(near | set(rest[: TOPK - len(near)]))
    return out


def check_best_keys(rank: int, P: int) -> bool:
    cp, x = ring_la.ContextParallel(group(P), scan="ring"), draw()
    for kind in KINDS:
        layout = cp.layout(T, kind, cu_seqlens=CU)
        how = dict(local=2, layout=layout)
        places = best_key_index(layout.shard(x["q"]), layout.shard(x["k"]), SIZE, TOPK, **how).places
        for h in range(HEADS):
            want = best_keys(x, h)
            assert sets(places[:, :, h : h + 1]) == [want[t] for t in layout.tokens().tolist()]
    return True


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_blocks_by_their_best_key_are_the_loop(ranks, P):
    assert all(ranks.run(P, check_best_keys, P))


def test_a_choice_in_8_bits_has_the_scores_of_the_loop_to_8_bits():
    """e4m3 rounds to one part in 16, half of it either way, so that sums of products are off by 4 % at most."""
    rng = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(1, 200, *s, generator=rng) for s in ((4, 48), (48,), (4,)))
    got, want = (lightning_index(q, k, w, 200, fp8=fp8).scores[:, 100:] for fp8 in (True, False))
    got, want = (x.where(x.isfinite(), 0.0) for x in (got, want))
    assert 0 < (got - want).norm() < 0.04 * want.norm()


@pytest.mark.parametrize(
    ("change", "name"), [(dict(fp8=1), "fp8"), (dict(fp8=True), "fp8"), (dict(backend="flash"), "backend")]
)
def test_what_a_choice_does_not_take_is_named(change, name):
    """Numbers of 64 bits are not rounded to 8."""
    x = draw()
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: "):
        lightning_index(x["q"], x["k"], x["w"], TOPK, **change)
