"""The cost model: the strategies' table, each one's regime; it measures quickly, and all ranks decide alike."""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil, log2

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ring_la
from ring_la.algebra import Affine, Transition
from ring_la.layout import Layout
from ring_la.scan import STRATEGIES, Chain, CostModel, Link
from ring_la.scan.auto import Line
from tests.support.pool import group

FREE = Line(0.0, float("inf"))
RANKS = (2, 3, 4, 8, 64)


def model(alpha: float, beta: float) -> CostModel:
    """A group whose messages all cost alpha + n / beta, and whose maps cost nothing."""
    line = Line(alpha, beta)
    return CostModel(line, line, line, line, FREE, FREE)


def maps(kind: Transition, heads: int, width: int) -> Affine:
    return Affine(kind, None, torch.empty(1, heads, width, width, device="meta"))


def chain(ranks: int, kind: str = "contiguous", documents: tuple[int, ...] = ()) -> Chain:
    return Chain.of(Layout(64 * ranks, kind, ranks, 0, (0, *documents, 64 * ranks)))


def test_a_ring_by_mailboxes_is_one_launch_a_link():
    """Where messages go by mailboxes, the ring's cost is that of its links: no host between hops, no map on top."""
    linked = replace(model(20e-6, 1e11), add=Line(5e-6, 1e12), post=50e-6, launch=20e-6, link=Line(5e-6, 1e11))
    like = maps("dense", 8, 64)
    S = like.b.nbytes
    assert linked.predict(chain(4), like)["ring"] == pytest.approx(50e-6 + 3 * (5e-6 + S / 1e11))
    assert linked.best(chain(4), like) == "ring"
    wide = maps("dense", 8, 512)  # wider than the kernel takes
    assert linked.predict(chain(4), wide) == replace(linked, link=None).predict(chain(4), wide)
    assert CostModel.from_dict(linked.to_dict()) == linked
    assert CostModel.from_dict(model(1e-6, 1e9).to_dict()) == model(1e-6, 1e9)


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("kind", ["identity", "scalar", "diagonal", "dense"])
def test_costs_are_the_bytes_and_depth_of_the_papers(kind, P):
    """Bytes received and depth of each strategy, one link a rank, as the papers have them."""
    H, K = 64, 8
    S, M = 4 * H * K * K, {"identity": 0, "scalar": 4 * H, "diagonal": 4 * H * K, "dense": 4 * H * K * K}[kind]
    costs = {name: strategy.cost(chain(P), maps(kind, H, K)) for name, strategy in STRATEGIES.items()}
    rounds = ceil(log2(P))
    received = {
        "ring": S,
        "pipelined": S,
        "all_gather": (P - 1) * (S + M),
        "doubling": rounds * (S + M),
        "all_to_all": (P - 1) / P * (2 * S + M),
    }
    if H % P:  # all_to_all cuts heads into column blocks until the ranks' shares are equal, and repeats M for each
        del received["all_to_all"]
    assert {name: costs[name].received for name in received} == received
    depth = {"ring": P - 1, "pipelined": P - 2 + 4, "all_gather": 1, "doubling": rounds, "all_to_all": 2}
    assert {name: sum(m.count for m in cost.messages) for name, cost in costs.items()} == depth
    for name in ("all_gather", "doubling", "all_to_all"):  # every rank takes part in every message
        assert sum(m.count * m.size for m in costs[name].messages) == costs[name].received


def test_only_dependent_messages_count():
    """A document's start cuts the chain; the two segments zigzag puts side by side on one rank need no message."""
    like = maps("identity", 4, 8)
    hops = lambda chain: STRATEGIES["ring"].cost(chain, like).messages[0].count  # noqa: E731
    assert hops(chain(8)) == 7
    assert hops(chain(8, "zigzag")) == 14
    assert hops(chain(8, documents=(2 * 64,))) == 5  # ranks 0–1, then 2–7
    assert hops(chain(8, documents=tuple(range(64, 512, 64)))) == 0
    for strategy in STRATEGIES.values():
        assert strategy.cost(chain(8, documents=tuple(range(64, 512, 64))), like).received == 0


@pytest.mark.parametrize(
    ("what", "P", "alpha", "beta", "kind", "width", "best"),
    [
        ("two ranks, a dense transition that need not travel", 2, 1e-5, 1e10, "dense", 128, "ring"),
        ("small states, latency counts", 8, 1e-4, 1e10, "diagonal", 16, "all_gather"),
        ("large states on one node", 8, 1e-5, 1e11, "identity", 512, "all_to_all"),
        ("large states, dense transitions, long chain", 64, 1e-6, 1e9, "dense", 512, "all_to_all"),
    ],
)
def test_each_regime_has_its_best_strategy(what, P, alpha, beta, kind, width, best):
    assert model(alpha, beta).best(chain(P), maps(kind, 64, width)) == best, what


def test_applying_maps_costs_time():
    """Where messages are free, the strategy that applies the fewest maps wins: all_to_all folds 1/P of the state."""
    slow = CostModel(*[Line(0.0, 1e15)] * 4, add=Line(0.0, 1e9), matmul=Line(0.0, 1e9))
    seconds = slow.predict(chain(4), maps("dense", 8, 64))
    apply = 4 * 8 * 64 * 64 / 1e9 + 2 * 8 * 64**3 / 1e9
    assert seconds["ring"] == pytest.approx(2 * apply, rel=1e-3)
    packed = 2 * 4 * 8 * 64 * 64 / 1e9
    assert seconds["all_gather"] == pytest.approx(2 * apply + packed, rel=1e-3)
    assert seconds["doubling"] > 2 * seconds["all_gather"], "composing costs a dense product more"


class Launches(TorchDispatchMode):
    """Counts the tensor operations that launch a kernel: neither views nor messages."""

    VIEWS = ("view", "unbind", "select", "slice", "split", "permute", "transpose", "expand", "unsqueeze", "alias", "t.")
    MESSAGES = ("send", "recv", "_allgather", "alltoall", "allgather")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.lstrip("_")
        self.count += not name.startswith((*self.VIEWS, "unsafe_view", *(m.lstrip("_") for m in self.MESSAGES)))
        return function(*args, **(kwargs or {}))


def check_launches(rank: int, kind: str) -> dict[str, tuple[int, int]]:
    """By strategy: operations this rank launched, and what the busiest is said to launch."""
    cp = ring_la.ContextParallel(group(), scan="ring", validate="never")
    steps = Chain.of(cp.layout(64 * cp.size, kind))
    like = Affine("scalar", None, torch.zeros(1, 4, 8, 8))
    links = [Link(Affine("scalar", torch.ones(1, 4), torch.ones(1, 4, 8, 8))) for _ in steps.local(rank)]
    found = {}
    for name, strategy in STRATEGIES.items():
        with Launches() as seen:
            strategy.start(steps, links, like, cp.comm).wait()
        found[name] = seen.count, strategy.cost(steps, like).operations
    return found


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_launches_are_as_many_as_predicted(ranks, kind):
    by_rank = ranks.run(4, check_launches, kind)
    for name in STRATEGIES:
        most, said = max(found[name][0] for found in by_rank), by_rank[0][name][1]
        assert abs(most - said) <= max(2, 0.2 * most), (name, most, said)


def test_the_host_counts_where_it_launches():
    """With a slow host the ring, which launches least, beats what would move the state faster."""
    quick, like = model(1e-6, 1e11), maps("identity", 32, 128)
    assert quick.best(chain(8), like) == "all_to_all"
    assert replace(quick, post=30e-6, launch=20e-6).best(chain(8), like) in ("ring", "all_gather")
    assert CostModel.from_dict(quick.to_dict()) == quick


def check_measured(rank: int) -> tuple[CostModel, float, str]:
    start = time.monotonic()
    cp = ring_la.ContextParallel(group(), scan="auto")
    seconds = time.monotonic() - start
    layout = cp.layout(1024)
    return cp.cost, seconds, cp.strategy(Chain.of(layout), maps("dense", 8, 64)).name


def test_all_ranks_measure_and_choose_alike(ranks):
    for _ in range(4):  # other processes may hold the cores
        results = ranks.run(4, check_measured)
        if all(seconds < 2 for _, seconds, _ in results):
            break
    assert all(seconds < 2 for _, seconds, _ in results)
    assert len({r[0] for r in results}) == 1
    assert len({r[2] for r in results}) == 1
    cost = results[0][0]
    assert all(w.alpha > 0 and w.beta > 0 for w in (cost.hop, cost.swap, cost.gather, cost.exchange))
