"""Steps that go ahead on GPUs, several at a word: what they wait for, whose tokens they take, and who is gone.

pytest -m gpu tests/gpu/test_serving_ahead.py
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ring_la import ContextParallel, PeerError
from ring_la.inference import generate
from ring_la.serving import Engine, Hybrid, NoText, decoding
from ring_la.serving.ranks import Ranks as Line
from ring_la.serving.ranks import What, Word
from ring_la.serving.static import StaticBatch
from tests.support import pool
from tests.support.pool import Ranks
from tests.support.serving import Timed, answer, make, prompt

SIZES = [pytest.param(P, id=f"P{P}", marks=pytest.mark.gpu(needs=P)) for P in (1, 2, 4)]
TWO = [pytest.param(2, id="P2", marks=pytest.mark.gpu(needs=2))]
WAITS = "called a synchronizing CUDA operation"
DRAWN = dict(temperature=0.8, seed=4, logprobs=2, frequency_penalty=0.5, top_k=50, top_p=0.9)


@pytest.fixture(scope="module")
def servers(request) -> Iterator[Ranks]:
    ranks = Ranks(request.param, "nccl")
    yield ranks
    ranks.stop()


@contextmanager
def noted(hold: float) -> Iterator[tuple[list[Word], list[str], list[tuple[int, ...]]]]:
    """Rank 0's words; what choosing and launching waits for, behind the captures; the seats of each step."""
    said: list[Word] = []
    waits: list[str] = []
    seats: list[tuple[int, ...]] = []
    tell = Line.tell

    def watched(call):
        def within(batch: StaticBatch, *arguments: bool) -> int | None:
            seats.append(tuple(batch._seats))
            kinds = [] if batch._step is None else list(batch._step.kinds.values())
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    return call(batch, *arguments)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                    replayed = len(kinds) == len(batch._step.kinds) and all(kind.graph is not None for kind in kinds)
                    waits.extend(f"{call.__name__}: {x.message}" for x in found if replayed and WAITS in str(x.message))

        return within

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "HOLD", hold)
        patch.setattr(Line, "tell", lambda line, word: said.append(word) or tell(line, word))
        for name in ("choose", "go_ahead"):
            patch.setattr(StaticBatch, name, watched(getattr(StaticBatch, name)))
        yield said, waits, seats


Told = tuple[list[int], list[float]]
"""A request's tokens, and what the model said of each where that is asked for."""


def check_ahead(rank: int, options: dict[str, Any]) -> tuple[list[list[Told]], list[int], list[str], bool]:
    """What each request was told by plain steps, by graphs with a word a step, and with words for many; how many words
    had steps; what was waited for; whether seats were ever in another order."""
    cp = ContextParallel(pool.group(), validate="never", timeout=60)
    served = Hybrid(make(256, 4, ["gdn", "fox", "mamba2", "attention"], torch.float32))
    asked, told, words, waits, mixed = [(5, 20), (300, 90), (37, 60), (3, 80), (64, 40)], [], [], [], False
    for captured, hold in ((False, 0.0), (True, 0.0), (True, 0.05)):
        jobs = [Timed(prompt(length), n, **options) for length, n in asked]
        with noted(hold) as (heard, found, seats):
            answer(Engine(served, NoText(), cp, batch=3, patience=90, capture=captured), jobs)
        told.append([(job.tokens, job.logprobs) for job in jobs])
        words.append(sum(word.what in (What.AHEAD, What.STEP) for word in heard))
        waits += found
        mixed |= any(each != tuple(range(len(each))) for each in seats)
    return told, words, waits, mixed


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("servers", SIZES, indirect=True)
def test_many_steps_at_a_word(servers, options, record_property):
    """Tokens are those of a word a step and of plain steps, and so is what is said of them, up to the rounding of
    batches of other sizes; behind the captures no host waits for its GPU but for tokens."""
    found = servers.run(servers.size, check_ahead, options, timeout=240)
    (plain, one, many), words, _, mixed = found[0]
    record_property("words", words)
    assert [len(tokens) for tokens, _ in many] == [20, 90, 60, 80, 40]
    for ours in (one, many):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in plain]
        for (_, mine), (_, theirs) in zip(ours, plain, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    assert mixed
    assert [waits for _, _, waits, _ in found] == [[]] * len(found)
    if servers.size > 1:
        assert words[2] < words[1]


def check_layers(rank: int) -> list[tuple[str, list[int], list[int], int, str]]:
    """Tokens by graphs and those of `generate`, of layers whose step was not one graph before."""
    out = []
    for kind in ("mlstm", "lightnet", "abc"):
        model = make(128, 2, [kind, "attention"], torch.float32)
        engine, job = Engine(Hybrid(model), NoText(), batch=2, patience=90, capture=True), Timed(prompt(9), 12)
        answer(engine, [job])
        want = generate(model, torch.tensor([prompt(9)], device="cuda"), 12)[0].tolist()
        out.append((kind, job.tokens, want, engine.batch.graphs, str(job.end)))
    return out


@pytest.mark.parametrize("servers", SIZES[:1], indirect=True)
def test_layers_with_a_running_maximum(servers):
    for kind, got, want, graphs, end in servers.run(1, check_layers, timeout=180)[0]:
        assert (got, graphs) == (want, 1), (kind, end)


def check_death(rank: int) -> tuple[str, float, str]:
    """The last rank dies between two words, with steps launched that rank 0 has not come to."""
    cp = ContextParallel(pool.group(), validate="never", timeout=60)
    model = make(256, 4, ["gdn", "attention"], torch.float32)
    engine, steps = Engine(Hybrid(model), NoText(), cp, batch=2, patience=90, capture=True), []
    go_ahead, began = engine.batch.go_ahead, 0.0

    def dying(send: bool) -> None:
        nonlocal began
        steps.append(True)
        began = time.monotonic()
        if len(steps) == 60 and rank == cp.size - 1:
            os._exit(1)
        go_ahead(send)

    engine.batch.go_ahead = dying
    job = Timed(prompt(9), 100_000)
    try:
        answer(engine, [job])
    except PeerError as error:
        return str(error), time.monotonic() - began, str(job.end)
    raise AssertionError("nobody died")


@pytest.mark.parametrize("servers", TWO, indirect=True)
def test_a_rank_that_dies_between_two_words_is_named(servers, record_property):
    [(message, seconds, end)] = servers.run(2, check_death, dying=(1,), timeout=90)
    record_property("seconds", seconds)
    assert "rank 1" in message
    assert "the server has failed (PeerError)" in end
    assert seconds < 15
