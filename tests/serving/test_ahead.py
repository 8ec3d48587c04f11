"""Ranks that decode together take several steps at one word of rank 0's, with tokens that no host knows yet."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ring_la import ContextParallel, DisagreementError, PeerError, capture
from ring_la.comm import Entry
from ring_la.serving import Ended, Engine, Event, Failed, Hybrid, NoText, decoding, static
from ring_la.serving.ranks import Ranks, What, Word
from ring_la.serving.sampling import Choosers
from tests.serving import drawn
from tests.serving.engines import FIXED, LONG, Asked, prompt, serve, truth
from tests.support.generation import make
from tests.support.pool import group
from tests.support.step_graphs import Recorded, standing


@contextmanager
def words(hold: float = 1e9, graphs: bool = True) -> Iterator[list[Word]]:
    """Steps go ahead, for so many seconds at a word, and are graphs; the words that rank 0 says."""
    said: list[Word] = []
    tell = Ranks.tell
    with pytest.MonkeyPatch.context() as patch:
        if graphs:
            standing(patch.setattr, Recorded)
        patch.setattr(static, "goes_ahead", lambda device: True)
        patch.setattr(decoding, "HOLD", hold)
        patch.setattr(Ranks, "tell", lambda ranks, word: said.append(word) or tell(ranks, word))
        yield said


def server(cp: ContextParallel, end: int | None = None, **options) -> Engine:
    text = NoText(frozenset() if end is None else {end})
    return Engine(Hybrid(make(FIXED)), text, cp, batch=2, patience=LONG, capture=True, **options)


def split(timeout: float = 60) -> ContextParallel:
    return ContextParallel(group(), scan="ring", validate="never", timeout=timeout)


def others_choose_otherwise(rank: int) -> None:
    """Ranks but the first find another token the likeliest, as rounding may have it, and what they draw is nobody's."""
    found = Choosers.choose
    if rank:
        other = lambda x, logits, ways, first=0: (found(x, logits, ways, first) + rank) % logits.shape[1]  # noqa: E731
        pytest.MonkeyPatch().setattr(Choosers, "choose", other)


DRAWN = dict(temperature=2.0, top_p=0.9, seed=1, frequency_penalty=0.5)


def check_words(rank: int, hold: float) -> tuple[list[list[int]], list[tuple[int, int]], int]:
    """Tokens, steps and sender of each word that has steps, and other words about the batch."""
    others_choose_otherwise(rank)
    jobs = [Asked(prompt(9), 12), Asked(prompt(4), 5, **DRAWN), Asked(prompt(3), 9)]
    with words(hold) as said:
        for job in jobs:
            serve(server(split()), [job])
    steps = [(word.length, word.key) for word in said if word.what == What.AHEAD]
    return [job.tokens for job in jobs], steps, sum(word.what in (What.STEP, What.STAY) for word in said)


@pytest.mark.parametrize("size", [2, 3])
def test_several_steps_are_one_word_and_all_take_the_tokens_of_rank_0(ranks, size):
    tokens, steps, others = ranks.run(size, check_words, 1e9, dying=())[0]
    ranks.stop()  # they are patched
    assert [tokens[0], tokens[2]] == [truth(prompt(9), 12, FIXED), truth(prompt(3), 9, FIXED)]
    assert tokens[1] == drawn.completion(make(FIXED), prompt(4), 5, **DRAWN)
    assert steps == [(1, 1), (11, 0), (1, 1), (4, 0), (1, 1), (8, 0)]  # within a step all have rank 0's
    assert others == 0
    tokens_, steps, _ = ranks.run(size, check_words, 0.0, dying=())[0]
    ranks.stop()
    assert tokens_ == tokens
    assert [n for n, _ in steps] == [1] * 26


def check_ends(rank: int, end: int, gone_after: int) -> tuple[list[list[Event]], list[list[int]]]:
    """Two sequences at a time: one that an end of the text ends, one that nobody waits for any more, and others."""
    jobs = [Asked(prompt(7), 12), Asked(prompt(5), 12), Asked(prompt(3), 12), Asked(prompt(6), 4)]
    gone, hear = jobs[1], jobs[1].emit
    gone.emit = lambda event: (hear(event), gone.cancel() if len(gone.events) == gone_after else None)
    with words(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "COLUMNS", 4)  # which they outgrow between two words
        serve(server(split(), end), jobs)
    return [job.events for job in jobs], [job.tokens for job in jobs]


def test_who_ends_between_two_words_hears_no_more(ranks):
    want = [truth(prompt(n), 12, FIXED) for n in (7, 5, 3, 6)]
    at = next(i for i in range(3, 9) if want[0][i] not in want[0][:i])
    end = want[0][at]
    until = [x[: x.index(end)] if end in x else x for x in want]
    events, tokens = ranks.run(3, check_ends, end, 3)[0]
    assert tokens == [until[0], until[1][:3], until[2], until[3][:4]]
    assert events[0][-1] == Ended("stop", "", 7, 0, at + 1)
    assert len(events[1]) == 3


def check_sampler(rank: int) -> tuple[list[list[int]], list[str]]:
    """A drawn sequence has no fourth token; of a later batch no tokens can be chosen at all."""
    jobs = [Asked(prompt(7), 9), Asked(prompt(5), 9, temperature=1.0, seed=2), Asked(prompt(4), 9)]
    for given in (jobs[:2], jobs[2:]):
        with words():
            serve(broken_samplers(server(split())), given)
    return [job.tokens for job in jobs], [str(job.events[-1]) for job in jobs if job.events]


def broken_samplers(engine: Engine) -> Engine:
    chosen, calls = engine.batch._next_tokens, []

    def broken() -> torch.Tensor:
        tokens, rows = chosen().clone(), [bool(row.chooser.ways) for row in engine.batch.rows]
        calls.append(any(rows))
        if len(calls) == 4 and not any(calls):
            raise RuntimeError("no tokens")
        return tokens.masked_fill(torch.tensor(rows), -1) if sum(calls) == 4 else tokens

    engine.batch._next_tokens = broken
    return engine


def test_tokens_that_cannot_be_chosen_fail_their_requests_behind_the_word(ranks):
    tokens, ends = ranks.run(2, check_sampler)[0]
    assert tokens[0] == truth(prompt(7), 9, FIXED)
    assert tokens[2] == truth(prompt(4), 9, FIXED)[:3]
    assert len(tokens[1]) == 3
    assert ends[1:] == [
        str(Failed("the model's result is not finite")),
        str(Failed("the request has failed (RuntimeError)")),
    ]


def check_step(rank: int, where: tuple[int, ...]) -> tuple[str, list[str], list[list[int]]]:
    """The fourth step fails on some ranks, between two words, behind its messages."""
    jobs, steps, raised = [Asked(prompt(7), 9), Asked(prompt(5), 4)], [], ""
    with words(graphs=False):  # whose messages wait for a rank that does not come, here, where no thread gives them up
        engine = server(split(timeout=20))
        step = engine.batch.go_ahead

        def broken(send: bool) -> None:
            step(send)
            steps.append(True)
            if len(steps) == 4 and rank in where:
                raise RuntimeError("no such step")

        engine.batch.go_ahead = broken
        if rank == 0:
            jobs[0].emit = (lambda hear: lambda event: (hear(event), later(engine, event, jobs[1])))(jobs[0].emit)
            engine.submit(jobs[0])
        try:
            engine.run()
        except DisagreementError as error:
            raised = str(error)
    return raised, [str(job.events[-1]) for job in jobs if job.events], [job.tokens for job in jobs]


def later(engine: Engine, event: Event, job: Asked) -> None:
    """Another request once one has failed."""
    if isinstance(event, Failed) and not engine._closed.is_set():
        engine.submit(job)
        engine.stop()


def test_a_step_that_fails_between_two_words(ranks):
    """Everywhere it fails its requests, and the server goes on; on one rank it is named at once on all."""
    raised, ends, tokens = ranks.run(3, check_step, (0, 1, 2))[0]
    assert raised == ""
    assert ends[0] == str(Failed("the request has failed (RuntimeError)"))
    assert tokens[1] == truth(prompt(5), 4, FIXED)
    for where in (0, 2):
        found = ranks.run(3, check_step, (where,), dying=())
        ranks.stop()  # their messages are half exchanged
        for raised, _, _ in found:
            assert "disagree" in raised, raised
            assert f"rank {where}: no such step" in raised
        assert found[0][1] == [str(Failed("the server has failed (DisagreementError)"))]


def check_dead(rank: int) -> tuple[str, float]:
    """The last rank dies behind more calls than this one has come to; a step that waits for it does not end."""
    comm = (cp := split()).comm
    step = capture(lambda x: x, cp)
    for _ in range(1 + (rank == 2)):
        comm.agreement.again(Entry.of("a call", "alike"))
    if rank == 2:
        os._exit(1)
    began = time.monotonic()
    try:
        step.finish(SimpleNamespace(query=lambda: False))
    except PeerError as error:
        seconds = time.monotonic() - began
        with pytest.raises(PeerError, match="died"):
            comm.all_gather(torch.zeros(1))
        return str(error), seconds
    raise AssertionError("nobody died")


def test_a_rank_that_died_is_named_before_its_time_is_over(ranks):
    for message, seconds in ranks.run(3, check_dead, dying=(2,)):
        assert "waits for messages that do not come: rank 2 (global rank 2) died" in message
        assert seconds < 10


def check_device(rank: int) -> tuple[list[bool], bool]:
    """Whether the host is seen to wait each time it looks for a step's end, and behind it."""
    comm, seen = (cp := split()).comm, []
    event = SimpleNamespace(query=lambda: len(seen) == 3 or seen.append(comm.waits_since is not None))
    capture(lambda x: x, cp).finish(event)
    return seen, comm.waits_since is None


def test_a_host_that_waits_for_the_end_of_a_step_is_seen_to_wait(ranks):
    assert ranks.run(2, check_device) == 2 * [([True] * 3, True)]
