"""Heads that forget within every link: the same results, fewer bytes, and nobody waits for farther ranks."""

from __future__ import annotations

import pytest
import torch

import ring_la
from ring_la import reference
from ring_la.algebra import Affine
from ring_la.scan import STRATEGIES, Chain, CostModel, Horizon
from ring_la.scan.auto import Line
from ring_la.scan.neighbours import Neighbours
from tests.support.pool import group
from tests.support.recurrence_cases import error, make_inputs

DECAYS = {"some": (-3.0, -1e-3, -2.0, 0.0), "all": (-3.0, -4.0, -2.0, -9.0)}
LAYOUTS = {  # tokens, kind, documents
    "contiguous": (263, "contiguous", None),
    "zigzag": (263, "zigzag", None),
    "packed": (263, "zigzag", (0, 5, 5, 130, 263)),
}
H, K, V = 4, 6, 5


def check_static(rank: int, P: int, decays: str, layout: str, dtype: torch.dtype) -> tuple[float, dict]:
    """Worst error against the token loop on the whole sequence, and bytes sent forward and backward, by strategy."""
    T, kind, cu = LAYOUTS[layout]
    g = torch.tensor(DECAYS[decays], dtype=torch.float64)
    whole = {
        n: t.detach().to(dtype).requires_grad_()
        for n, t in make_inputs("linear_attention", 1, T, H=H, K=K, V=V).items()
    }
    want = reference.lightning_attention(**whole, g=g, cu_seqlens=cu).o
    grads = torch.autograd.grad(want.square().sum(), list(whole.values()))
    worst, sent = 0.0, {}
    for scan in STRATEGIES:
        cp = ring_la.ContextParallel(group(P), scan=scan)
        split = cp.layout(T, kind, cu_seqlens=cu)
        local = {n: split.shard(t.detach()).requires_grad_() for n, t in whole.items()}
        before = cp.comm.bytes_sent
        out = ring_la.lightning_attention(**local, g=g, layout=split).o
        forward = cp.comm.bytes_sent
        got = torch.autograd.grad(out.square().sum(), list(local.values()))
        pairs = [(out, split.shard(want)), *((a, split.shard(b)) for a, b in zip(got, grads))]
        worst = max(worst, *(error(a, b) for a, b in pairs))
        sent[scan] = forward - before, cp.comm.bytes_sent - forward
    return worst, sent


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_with_fewer_bytes(ranks, decays, layout):
    for P, dtype, limit in ((2, torch.float64, 1e-12), (3, torch.float32, 2e-6), (4, torch.float64, 1e-12)):
        results = ranks.run(P, check_static, P, decays, layout, dtype)
        assert max(e for e, _ in results) < limit
        T, kind, cu = LAYOUTS[layout]
        split = ring_la.layout.Layout(T, kind, P, 0, cu)
        chain, wide = Chain.of(split), torch.float64 if dtype == torch.float64 else torch.float32
        like = Affine("scalar", None, torch.empty(1, H, K, V, dtype=wide, device="meta"))
        shortest = min(s.stop - s.start for s, p in zip(split.segments, chain.passes) if p)
        horizon = Horizon.of(DECAYS[decays], shortest, wide, torch.device("cpu"))
        assert horizon is not None
        near, far = horizon.counts
        state = like.b.nbytes // H
        for scan, strategy in STRATEGIES.items():
            most, most_back = (max(sent[scan][way] for _, sent in results) for way in (0, 1))
            whole = strategy.cost(chain, like).received
            if far and most != whole:
                rest = Affine("scalar", None, torch.empty(1, far, K, V, dtype=wide, device="meta"))
                assert most <= chain.arrivals * near * state + strategy.cost(chain, rest).received
                assert most < whole
            if P == 4 and layout == "contiguous" and scan not in ("ring", "pipelined"):
                assert max(most, most_back) < whole, scan
            if not far:
                assert most == chain.arrivals * near * state == Neighbours().cost(chain.forgetful, like).received


@pytest.mark.parametrize(("host", "pays"), [(0.0, True), (1e-4, False)])
def test_two_exchanges_only_where_they_take_less_time(host, pays):
    """Fewer bytes are worth a second exchange on a slow link, not where the host is what costs."""
    split = ring_la.layout.Layout(64 * 8, "contiguous", 8, 0)
    chain, like = Chain.of(split), Affine("scalar", None, torch.empty(1, 4, 32, 32, device="meta"))
    line, free = Line(1e-6, 1e9), Line(0.0, float("inf"))
    model = CostModel(line, line, line, line, free, free, post=host, launch=host)
    horizon = Horizon.of(DECAYS["some"], 64, torch.float32, torch.device("cpu"))
    choose = lambda chain, like: STRATEGIES["all_gather"]  # noqa: E731
    assert horizon.counts == (2, 2)
    assert horizon.pays(chain, like, choose, model.seconds) == pays


def test_learned_decays_are_not_read():
    g = torch.tensor([-3.0], requires_grad=True)
    assert ring_la.recurrences.agreement.known(g, None) is None


@pytest.mark.parametrize(("tokens", "near"), [(9, 0), (11, 1), (16, 1), (31, 2)])
def test_where_the_horizon_lies(tokens, near):
    h = Horizon.of((-3.0, -1.0, 0.0), tokens, torch.float32, torch.device("cpu"))
    assert (h.counts[0] if h else 0) == near
