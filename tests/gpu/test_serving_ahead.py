"""Steps that go ahead on GPUs, several at a word: what they wait for, whose tokens they take, and who is gone.

pytest -m gpu tests/gpu/test_serving_ahead.py
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ring_la import ContextParallel, PeerError
from ring_la.inference import generate
from ring_la.serving import Engine, Event, Hybrid, NoText, decoding
from ring_la.serving.ranks import Ranks as Line
from ring_la.serving.ranks import What, Word
from ring_la.serving.static import StaticBatch
from tests.serving.engines import Asked, serve
from tests.support import pool
from tests.support.pool import Ranks
from tests.support.serving import make, prompt

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


def check_ahead(
    rank: int, kinds: list[str], options: dict
) -> tuple[list[list[list[Event]]], list[int], list[str], bool]:
    """Events of each request by plain steps, by graphs with a word a step, and with words for many; how many words had
    steps; what they waited for; whether seats were ever in another order."""
    cp = ContextParallel(pool.group(), validate="never", timeout=60)
    served, events, words, waits, mixed = Hybrid(make(256, 4, kinds, torch.float32)), [], [], [], False
    asked = [(5, 20), (300, 90), (37, 60), (3, 80), (64, 40)]
    for captured, hold in ((False, 0.0), (True, 0.0), (True, 0.05)):
        jobs = [Asked(prompt(length), n, **options) for length, n in asked]
        with noted(hold) as (heard, found, seats):
            serve(Engine(served, NoText(), cp, batch=3, patience=90, capture=captured), jobs)
        events.append([job.events for job in jobs])
        words.append(sum(word.what in (What.AHEAD, What.STEP) for word in heard))
        waits += found
        mixed |= any(each != tuple(range(len(each))) for each in seats)
    return events, words, waits, mixed


def tokens(events: list[list[Event]]) -> list[list[int]]:
    return [[e.token for e in each if hasattr(e, "token")] for each in events]


def said(events: list[list[Event]]) -> list[list[float]]:
    return [[e.said.logprob for e in each if getattr(e, "said", None)] for each in events]


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("servers", SIZES, indirect=True)
def test_many_steps_at_a_word(servers, options, record_property):
    """Tokens are those of a word a step and of plain steps, and so is what is said of them, up to the rounding of
    batches of other sizes; behind the captures no host waits for its GPU but for tokens."""
    found = servers.run(servers.size, check_ahead, ["gdn", "fox", "mamba2", "attention"], options, timeout=240)
    (plain, one, many), words, _, mixed = found[0]
    record_property("words", words)
    assert [len(each) for each in tokens(many)] == [20, 90, 60, 80, 40], [each[-1] for each in many]
    assert tokens(many) == tokens(one) == tokens(plain)
    for ours, theirs in zip(said(many), said(plain), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert mixed
    assert [each for _, _, each, _ in found] == [[]] * len(found)
    if servers.size > 1:
        assert words[2] < words[1]


def check_layers(rank: int) -> list[tuple[str, list[int], list[int], int, str]]:
    """Tokens by graphs and those of `generate`, of layers whose step was not one graph before."""
    out = []
    for kind in ("mlstm", "lightnet", "abc"):
        model = make(128, 2, [kind, "attention"], torch.float32)
        serve(
            engine := Engine(Hybrid(model), NoText(), batch=2, patience=90, capture=True), [job := Asked(prompt(9), 12)]
        )
        want = generate(model, torch.tensor([prompt(9)], device="cuda"), 12)[0].tolist()
        out.append((kind, job.tokens, want, engine.batch.graphs, str(job.events[-1])))
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
    job = Asked(prompt(9), 100_000)
    try:
        serve(engine, [job])
    except PeerError as error:
        return str(error), time.monotonic() - began, str(job.events[-1:])
    raise AssertionError("nobody died")


@pytest.mark.parametrize("servers", TWO, indirect=True)
def test_a_rank_that_dies_between_two_words_is_named(servers, record_property):
    [(message, seconds, end)] = servers.run(2, check_death, dying=(1,), timeout=90)
    record_property("seconds", seconds)
    assert "rank 1" in message
    assert "the server has failed (PeerError)" in end
    assert seconds < 15
