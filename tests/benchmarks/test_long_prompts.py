"""What the rows of long prompts are made of."""

from __future__ import annotations

import argparse
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch

from benchmarks import long_prompts
from benchmarks.replays import Replays, quantile
from benchmarks.rows import Rows
from ring_la import capture
from ring_la.serving import Ended, Failed, NewToken


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


class Turns:
    """An engine in whose turns one more request comes, and all that are there get some tokens, a second each."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._coming, self._there = tokens, [], []
        self._stopped, self.asked = False, []
        self.now = self.replays = 0
        self.model = SimpleNamespace(vocab_size=257, model=torch.nn.Linear(2, 2))
        self.states, self.batch = SimpleNamespace(kept={}), SimpleNamespace(graphs=1)
        self.cp, self.ranks = None, SimpleNamespace(comm=self)

    @property
    def wait_seconds(self) -> float:
        return self.now / 2

    def taken(self) -> dict[str, int]:
        """As `Replays`."""
        replays, self.replays = self.replays, 0
        return {"replays": replays}

    def submit(self, *jobs: long_prompts.Asked) -> None:
        self._coming += jobs
        self.asked.append(jobs)

    def stop(self) -> None:
        self._stopped = True

    def run(self, failing: int | None = None) -> None:
        """Until it is stopped; the request of that number fails when it comes."""
        came = itertools.count()
        while not self._stopped:
            self._there = [job for job in self._there if not job.cancelled and job.end is None]
            if self._coming:
                self._there.append(self._coming.pop(0))
                if next(came) == failing:
                    self._there[-1].emit(Failed("no room"))
            for _ in range(self._tokens):
                if all(job.cancelled or job.end is not None for job in self._there):
                    break
                self.now, self.replays = self.now + 1, self.replays + 1
                for job in [*self._there]:
                    self._token(job)

    def _token(self, job: long_prompts.Asked) -> None:
        if job.cancelled or job.end is not None:
            return
        job.decoded += 1
        job.emit(NewToken(0, ""))
        if job.decoded == job.request.max_tokens and not job.cancelled:
            job.emit(Ended("length", "", 0, 0, job.decoded))


@pytest.fixture
def turns(monkeypatch):
    """What rows are made of, in turns of so many tokens."""

    def rows(tokens: int, failing: int | None = None) -> list[dict]:
        engine, found = Turns(tokens), Rows(None)
        monkeypatch.setattr(long_prompts.time, "perf_counter", lambda: float(engine.now))
        args = argparse.Namespace(once=False, batches=[1, 8], tokens=4, temperature=0.0, top_p=1.0, limit=1e9)
        long_prompts.Runs(engine, args, 0.0, found, engine).start(16)
        engine.run(failing)
        return found.rows

    return rows


def test_the_prompt_before_is_decoded_until_a_step_is_a_graph():
    """Else the step that a first token is told behind is one that runs eagerly."""
    engine = Turns(1)
    args = argparse.Namespace(once=False, batches=[1], tokens=4, temperature=0.0, top_p=1.0, limit=1e9)
    long_prompts.Runs(engine, args, 0.0, Rows(None), engine).start(16)
    engine.run()
    [cold], [first], _ = engine.asked
    warmup = inspect.signature(capture).parameters["warmup"].default
    assert cold.request.max_tokens > warmup
    assert first.request.max_tokens == 2
    assert cold.request.ids != first.request.ids


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_token_is_timed_while_all_sequences_are_there(turns, tokens):
    """However many steps are taken between two that come; replays and waits are those of these tokens."""
    cold, first, *rows = turns(tokens)
    assert (cold["what"], first["what"], first["seconds"]) == ("first token, cold", "first token", 1.0)
    assert [row["what"] for row in rows] == ["a token of 1", "a token of 8"]
    for row in rows:
        assert (row["steps"], row["replays"]) == (4, 4)
        assert (row["smallest"], row["milliseconds"], row["90th percentile"]) == (1e3, 1e3, 1e3)
        assert row["waits for hosts"] == 500.0
    assert rows[1]["all seconds"] == 7 * tokens + 5


def test_a_row_of_which_a_request_fails_says_so_and_the_next_goes_on(turns):
    rows = turns(2, failing=5)  # the third of eight
    assert "no room" in rows[3]["failed"]
    assert "milliseconds" not in rows[3]
    assert rows[2]["steps"] == 4
    rows = turns(2, failing=2)
    assert "no room" in rows[2]["failed"]
    assert rows[3]["steps"] == 4


def test_sequences_that_end_before_all_are_there_have_no_figures(turns, monkeypatch):
    monkeypatch.setattr(long_prompts, "COMING", 2)
    assert turns(7)[3]["failed"] == "one has ended before all had their tokens"
