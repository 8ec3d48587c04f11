"""What the rows of long prompts are made of."""

from __future__ import annotations

import torch

from benchmarks.replays import Replays, quantile


class Clock:
    """An event of a GPU whose time is two more than that of the last, and which has come up to the eighth."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Clock.now += 2
        self.at = Clock.now

    def query(self) -> bool:
        return self.at <= 8 * 2 + 1

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


def test_replays_are_timed_and_what_is_between_them(monkeypatch):
    def replay(graph: object) -> None:
        Clock.now += 1

    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay, raising=False)
    replays = Replays()
    with replays.noted():
        for _ in range(5):
            torch.cuda.CUDAGraph.replay(None)
    assert replays.taken() == {"replays": 3, "replay, device": 3.0, "between replays, device": 2.0}
    torch.cuda.CUDAGraph.replay(None)
    assert replays.taken()["replays"] == 0


def test_quantiles():
    numbers = [float(x) for x in (5, 1, 4, 2, 3)]
    assert [quantile(numbers, part) for part in (0.0, 0.5, 0.9)] == [1, 3, 5]
    assert quantile([], 0.5) is None
