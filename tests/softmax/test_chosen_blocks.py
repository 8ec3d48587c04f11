"""Kernels for chosen blocks of keys under Triton's interpreter, against the loop. GPUs: tests/gpu/test_chosen.py."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.attention_cases import error
from tests.support.interpreter import interpreted

interpreted()
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("GPUs have a check of their own", allow_module_level=True)

import ring_la  # noqa: E402
from ring_la import reference  # noqa: E402
from ring_la.layout import Layout  # noqa: E402
from ring_la.softmax.backends import CHOSEN, QueryRows  # noqa: E402
from ring_la.softmax.backends.backend import Ask  # noqa: E402
from ring_la.softmax.backends.triton import chosen_blocks, launch  # noqa: E402
from ring_la.softmax.backends.triton.chosen import fastest  # noqa: E402
from ring_la.softmax.backends.triton.table import TileSettings  # noqa: E402
from ring_la.softmax.geometry import Pair, Tokens  # noqa: E402
from ring_la.softmax.merging import Gradients, Partial  # noqa: E402
from ring_la.softmax.scores import Scores  # noqa: E402


class Case(NamedTuple):
    """Sizes of a call; `aligned` False: blocks begin anywhere, `twice`: some are chosen twice."""

    T: int = 50
    H: int = 4
    Hk: int = 2
    K: int = 16
    V: int = 16
    block: int = 16
    S: int = 3
    heads: int = 2
    B: int = 1
    cu: tuple[int, ...] | None = None
    aligned: bool = True
    twice: bool = False
    window: tuple[int, int] = (-1, -1)
    causal: bool = True
    scale: float | None = None


PACKED = Case(cu=(0, 20, 20, 21, 50), aligned=False, K=24)
CASES = {
    "batch, one choice for all heads": Case(B=2, heads=1, V=12),
    "packed, blocks that begin anywhere": PACKED,
    "window, 3 heads of which a program has 2": Case(H=6, window=(30, 7), causal=False),
    "blocks of 20 keys": Case(block=20, aligned=False),
    "blocks of several tiles": Case(T=90, block=80, S=2),
    "one head a key head": Case(H=2, block=32),
    "more heads than a program has": Case(H=12, Hk=1, heads=1),
    "chosen twice, the smallest scores": Case(twice=True, scale=-0.4),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """fp32 has rows / 4 and keys / 2."""
    monkeypatch.setattr(launch, "interpreted", True)
    for name, rows in dict(FORWARD=32, QUERIES=16, KEYS=32).items():
        monkeypatch.setattr(chosen_blocks, name, TileSettings(rows, 64, 4, 2))


@cache
def draw(case: Case) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """(q, k and v, do, dlse, a choice), some of which is nothing; fp64."""
    rng, T = torch.Generator().manual_seed(case.T + case.block), case.T
    heads = (case.H, case.K), (case.Hk, case.K), (case.Hk, case.V), (case.H, case.V)
    *x, do = (torch.randn(case.B, T, *shape, generator=rng, dtype=torch.float64) for shape in heads)
    starts = torch.arange(0 if case.aligned else 3, T, case.block)
    noise = torch.rand(case.B, T, case.heads, len(starts), generator=rng)
    chosen = starts[noise.topk(min(case.S, len(starts)), -1).indices]
    if case.twice:
        chosen[..., -1] = chosen[..., 0]
    chosen = torch.where(torch.rand(chosen.shape, generator=rng) < 0.1, -1, chosen).int()
    return x, do, torch.randn(case.B, case.H, T, generator=rng, dtype=torch.float64), chosen


def results(function, case: Case, dtype: torch.dtype, **how) -> list[Tensor]:
    """o, lse and gradients."""
    x, do, dlse, chosen = draw(case)
    leaves = [t.to(dtype).requires_grad_() for t in x]
    out = function(*leaves, chosen, block=case.block, window=case.window, causal=case.causal, scale=case.scale, **how)
    lse = torch.where(torch.isneginf(out.lse), 0.0, out.lse)
    return [out.o.detach(), lse.detach(), *torch.autograd.grad((out.o * do).sum() + (lse * dlse).sum(), leaves)]


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_loop(name):
    case = CASES[name]
    want = results(reference.sparse_attention, case, torch.float64, cu_seqlens=case.cu)
    cu = None if case.cu is None else torch.tensor(case.cu)
    got = results(ring_la.sparse_attention, case, torch.float32, cu_seqlens=cu, backend="triton_blocks")
    errors = [error(a, b) for a, b in zip(got, want)]
    assert max(errors) < 2e-5, errors


def test_lists_in_parts_are_the_same(monkeypatch):
    """Of 64 queries at a time; blocks united among few choices."""
    case = Case(T=100, B=2)
    want = results(ring_la.sparse_attention, case, torch.float64, backend="torch")
    monkeypatch.setattr(chosen_blocks, "SLOTS", 1)
    monkeypatch.setattr(chosen_blocks, "UNITED", 8)
    got = results(ring_la.sparse_attention, case, torch.float32, backend="triton_blocks")
    errors = [error(a, b) for a, b in zip(got, want)]
    assert max(errors) < 2e-5, errors


def test_nothing_chosen_is_nothing():
    for got in results(ring_la.sparse_attention, Case(S=0), torch.float32, backend="triton_blocks"):
        assert not got.any()


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_parts_of_a_sequence_are_the_whole(kind):
    """Queries of each of two ranks against keys of each: blocks are cut where segments end, or have every other key."""
    case = Case(T=75, cu=(0, 43, 75), aligned=False)
    x, do, dlse, chosen = draw(case)
    cu = torch.tensor(case.cu)
    o, lse, *grads = results(ring_la.sparse_attention, case, torch.float64, cu_seqlens=cu, backend="torch")
    whole = ring_la.sparse_attention(*x, chosen, block=16, cu_seqlens=cu, backend="torch").lse
    layout = Layout(case.T, kind, 2, cu_seqlens=case.cu)
    sides = [Tokens.of_ranks(layout, [rank], torch.device("cpu")) for rank in range(2)]
    scores, kernel = Scores(case.K**-0.5, right=0, block=16), CHOSEN["triton_blocks"]
    totals = [torch.zeros_like(t) for t in grads]
    for rows in sides:
        mine = rows.index
        q, own_do = (t[:, mine].float() for t in (x[0], do))
        out, here = Partial((*q.shape[:3], case.V), q.dtype, q.device), kernel.of(chosen[:, mine])
        for keys in sides:
            k, v = (t[:, keys.index].float() for t in x[1:])
            here.forward(q, k, v, scores, Pair(rows, keys, scores.reach), out)
        got, got_lse = out.result()
        assert error(got, o[:, mine]) < 2e-5
        assert error(torch.where(torch.isneginf(got_lse), 0.0, got_lse), lse[:, :, mine]) < 2e-5
        delta = (do * o).sum(-1).transpose(1, 2) - torch.where(torch.isneginf(whole), 0.0, dlse)
        known = QueryRows(q, got, own_do, whole[:, :, mine].float(), delta[:, :, mine].float())
        for keys in sides:
            k, v = (t[:, keys.index].float() for t in x[1:])
            shares = Gradients.of(q, k, v)
            here.backward(known, k, v, scores, Pair(rows, keys, scores.reach), shares)
            for total, share, at in zip(totals, (shares.dq, shares.dk, shares.dv), (mine, keys.index, keys.index)):
                total[:, at] += share.result(torch.float64)
    errors = [error(a, b) for a, b in zip(totals, grads)]
    assert max(errors) < 2e-5, errors


@pytest.mark.parametrize(("change", "what"), [(dict(block=8), "blocks of at least 16"), (dict(K=160), "up to 128")])
def test_what_it_cannot_do_is_refused(change, what):
    case = Case(**change)
    x, _, _, chosen = draw(case)
    with pytest.raises(ring_la.UnsupportedError, match=what):
        ring_la.sparse_attention(*(t.float() for t in x), chosen, block=case.block, backend="triton_blocks")


def split_errors(rank: int, kind: str, cu: tuple[int, ...] | None) -> list[float]:
    """Of o and the gradients of a call on a split sequence, by the kernels, keys by ring and gathered."""
    from tests.support.pool import group

    case, found = PACKED if cu else Case(T=107), []
    (q, k, v), do, _, chosen = draw(case)
    whole = [x.detach().requires_grad_() for x in (q, k, v)]
    offsets = None if cu is None else torch.tensor(cu)
    o = ring_la.sparse_attention(*whole, chosen, block=case.block, cu_seqlens=offsets, backend="torch").o
    want = [o, *torch.autograd.grad(o, whole, do)]
    for attention in ("ring", "all_gather"):
        cp = ring_la.ContextParallel(group(), scan="ring", attention=attention)
        layout = cp.layout(case.T, kind, cu_seqlens=cu)
        local = [layout.shard(x).float().requires_grad_() for x in (q, k, v)]
        how = dict(block=case.block, layout=layout, backend="triton_blocks")
        with mock.patch.object(launch, "interpreted", True):
            o = ring_la.sparse_attention(*local, layout.shard(chosen), **how).o
            got = [o, *torch.autograd.grad(o, local, layout.shard(do).float())]
        found += [error(layout.gather(a), b) for a, b in zip(got, want)]
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_ranks_go_by_the_kernels(ranks, kind, packed):
    for found in ranks.run(2, split_errors, kind, PACKED.cu if packed else None):
        assert max(found) < 2e-5, found


def test_what_a_call_takes_that_names_none():
    ask = Ask(torch.device("cuda"), torch.bfloat16, heads=64, groups=4, width=128, value_width=128, block=64)
    others = dict(block=32), dict(groups=16), dict(width=192), dict(dtype=torch.float32)
    assert fastest(ask) == "triton_blocks"
    assert {fastest(replace(ask, **other)) for other in others} == {"triton"}
    assert fastest(replace(ask, groups=1, width=576, value_width=512)) == "triton_sorted"
    suiting = lambda asked: [b.name for b in CHOSEN.values() if b.suits(asked)]  # noqa: E731
    assert suiting(ask) == ["triton_blocks", "torch"]
    assert suiting(replace(ask, repeatable=True)) == ["torch"]
