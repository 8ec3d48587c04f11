"""The cost model: it knows each strategy's regime, measures quickly, and all ranks decide alike."""

from __future__ import annotations

import time

import pytest

import ring_la
from ring_la.scan import STRATEGIES, CostModel
from ring_la.scan.auto import Wire
from tests.distributed.pool import group

MB = 2**20


def model(ranks: int, alpha: float, beta: float) -> CostModel:
    wire = Wire(alpha, beta)
    return CostModel(ranks, wire, wire, wire)


@pytest.mark.parametrize(
    ("what", "ranks", "alpha", "beta", "state", "transition", "best"),
    [
        ("two ranks, a dense transition that need not travel", 2, 1e-5, 1e10, 2 * MB, 2 * MB, "ring"),
        ("small states, latency counts", 8, 1e-4, 1e10, 4096, 64, "all_gather"),
        ("large states on one node", 8, 1e-5, 1e11, 64 * MB, 0, "all_to_all"),
        ("large states, dense transitions, long chain", 64, 1e-6, 1e9, 16 * MB, 64 * MB, "all_to_all"),
    ],
)
def test_regimes(what, ranks, alpha, beta, state, transition, best):
    assert model(ranks, alpha, beta).best(state, transition, ranks) == best, what


def test_predictions_follow_the_table():
    """Depth times latency plus bytes over bandwidth, for each row of the strategies' table."""
    p, a, b, S, M = 8, 1e-5, 1e9, 10 * MB, MB
    seconds = model(p, a, b).predict(S, M, p)
    assert set(seconds) == set(STRATEGIES)
    assert seconds["ring"] == pytest.approx((p - 1) * (a + S / b))
    assert seconds["all_gather"] == pytest.approx(a + (p - 1) * (S + M) / b)
    assert seconds["doubling"] == pytest.approx(3 * (a + (S + M) / b))
    assert seconds["all_to_all"] == pytest.approx(2 * a + (p - 1) / p * (2 * S + M) / b)
    assert a < seconds["pipelined"] < seconds["ring"]


def check_measured(rank: int) -> tuple[CostModel, float, str]:
    start = time.monotonic()
    cp = ring_la.ContextParallel(group(), scan="auto")
    seconds = time.monotonic() - start
    return cp.cost, seconds, cp.strategy(MB, 0, 4).name


def test_all_ranks_measure_and_choose_alike(ranks):
    results = ranks.run(4, check_measured)
    assert len({r[0] for r in results}) == 1
    assert len({r[2] for r in results}) == 1
    assert all(seconds < 2 for _, seconds, _ in results)
    cost = results[0][0]
    assert all(w.alpha > 0 and w.beta > 0 for w in (cost.hop, cost.gather, cost.exchange))
