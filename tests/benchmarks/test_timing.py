"""What `benchmarks.timing` times, and what goes before."""

from __future__ import annotations

import time
from datetime import timedelta

from benchmarks.timing import in_turns
from ring_la.comm import Group
from tests.support import pool


def leading(rank: int) -> tuple[list[int], float]:
    """The numbers of the calls of an arm whose first ones after a barrier are slow, and the time that is told."""
    calls: list[int] = []

    def step() -> None:
        time.sleep(0.1 if len(calls) % 5 < 2 else 0.001)
        calls.append(len(calls))

    group = Group(pool.group(), timedelta(seconds=60), "torch")
    return calls, in_turns({"it": step}, group, rounds=3, inner=3, warm=0, lead=2)["it"]


def test_calls_that_lead_are_not_timed(ranks):
    for calls, seconds in ranks.run(2, leading):
        assert calls == list(range(15)), "two that lead and three that are timed, in three rounds"
        assert 0.001 <= seconds < 0.05
