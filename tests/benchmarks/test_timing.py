"""What `benchmarks.timing` times, and what goes before."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import in_turns
from ring_la.comm import Group
from tests.support import pool


class Clock:
    """An event of a GPU whose clock goes on by what steps say."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Clock.now

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


@pytest.fixture
def gpu(monkeypatch):
    """A GPU to time, and what it was given."""
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(Clock, "now", 0.0)


def step(*milliseconds: float):
    """A step whose calls take so long, one after the other, and then as the last."""
    left = list(milliseconds)

    def call() -> None:
        Clock.now += left.pop(0) if len(left) > 1 else left[0]

    return call


def test_calls_in_a_row_and_what_is_between_their_ends(gpu):
    assert timing.elapsed(step(1, 2, 6), 3) == 3
    assert timing.gaps(step(1, 2, 6), 4) == [1, 2, 6, 6]


def test_steps_in_turns_behind_rounds_that_do_not_count(gpu):
    steps = {"a": step(100, 100, 3, 1, 2), "b": step(100, 100, 5)}
    assert timing.medians(steps, rounds=3, warm=2) == {"a": 2, "b": 5}
    assert timing.median(step(100, 100, 4, 2, 6, 8), rounds=2, inner=2) == 5
    assert timing.medians({"a": step(7)}, rounds=1, clock=lambda step, inner: 0.5 * inner) == {"a": 0.5}


def test_kernels_of_a_call_the_longest_first(gpu, monkeypatch):
    long = "long" * 30
    seen = [("short", 2, 4.0), (long + "1", 2, 6.0), ("cudaLaunchKernel", 6, 0.0), (long + "2", 4, 10.0)]
    events = [SimpleNamespace(key=k, count=n, self_device_time_total=us) for k, n, us in seen]
    monkeypatch.setattr(timing, "profile", lambda activities: nullcontext(SimpleNamespace(key_averages=lambda: events)))
    assert timing.kernels(lambda: None, calls=2) == [(long[:80], 3, 8.0), ("short", 1, 2.0)]


def test_the_clock_of_a_host():
    for clock in (timing.wall, timing.host):
        assert 0.01 <= clock(lambda: time.sleep(0.01), 3) < 0.02
    assert timing.largest([1.5, 2.5]) == [1.5, 2.5], "there are no other ranks"


def test_what_cannot_be_captured_leaves_the_stream_as_it_was(gpu, monkeypatch):
    done = []

    class Graph:
        def replay(self) -> None:
            done.append("replayed")

    @contextmanager
    def graph(of: Graph, capture_error_mode: str = "global"):
        done.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
    monkeypatch.setattr(torch.cuda, "set_stream", done.append)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)

    def wrong() -> None:
        raise ValueError("no graph of this")

    replays, refused = timing.captured({"right": lambda: done.append("called"), "wrong": wrong})
    assert [*replays] == ["right"]
    assert refused == {"wrong": "not capturable: ValueError: no graph of this"}
    assert done[:4] == ["thread_local", "called", "thread_local", "the stream"]
    done.clear()
    timing.graph_of(lambda: done.append("called"), warm=2).replay()
    assert done == ["called", "called", "global", "called", "replayed"]


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


def largest_of(rank: int) -> list[float]:
    return timing.largest([float(rank), -float(rank)])


def test_the_slowest_rank_counts(ranks):
    assert ranks.run(pool.SIZE, largest_of) == [[3.0, 0.0]] * 4
