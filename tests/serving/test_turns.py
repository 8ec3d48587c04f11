"""Whose turn it is: prompts between tokens, who waits, who goes away, and the end of a server."""

from __future__ import annotations

import time

import pytest

from ring_la import ArgumentError, ContextParallel
from ring_la.serving import Busy, Ended, Engine, Event, Failed, Hybrid, NoText
from tests.serving.engines import SOME, Asked, engine, prompt, serve, truth
from tests.support.generation import make
from tests.support.pool import group


def test_who_goes_away_is_forgotten():
    server = engine(piece=4, batch=2)  # the others wait
    gone, reading, waits, stays = Asked(prompt(5), 50), Asked(prompt(40)), Asked(prompt(3)), Asked(prompt(6), 5)
    hear, seen = gone.emit, []

    def leave(event: Event) -> None:
        hear(event)
        seen.append(server.running)
        if len(gone.events) == 3:
            gone.cancel()
            reading.cancel()
            waits.cancel()

    gone.emit = leave
    serve(server, [gone, reading, waits, stays])
    assert len(gone.events) == 3
    assert (reading.events, waits.events) == ([], [])
    assert stays.tokens == truth(prompt(6), 5)
    assert seen[-1] == 2
    assert not server.states.open


def test_too_many_and_too_late():
    server = engine(waiting=2)
    jobs = [Asked(prompt(3)) for _ in range(2)]
    for job in jobs:
        server.submit(job)
    with pytest.raises(Busy, match="2 requests are waiting"):
        server.submit(Asked(prompt(3)))
    server.stop()
    with pytest.raises(Busy, match="about to stop"):
        server.submit(Asked(prompt(3)))
    server.run()
    assert all(isinstance(job.events[-1], Ended) for job in jobs)


def test_requests_that_do_not_end_in_time_fail():
    server = Engine(Hybrid(make(SOME)), NoText(), patience=0.2)
    serve(server, [job := Asked(prompt(3), 100_000)])
    assert job.events[-1] == Failed("the server has stopped")
    with pytest.raises(ArgumentError, match="piece: expected an int"):
        engine(piece=0)


def test_sequences_wait_for_room():
    jobs, most = [Asked(prompt(n), 4) for n in (20, 6, 3)], []
    for job in jobs:
        hear = job.emit
        job.emit = lambda event, hear=hear: (hear(event), most.append(len(server.batch.rows)))
    server = engine(room=36)  # the first two are 34 together, the last is 7
    serve(server, jobs)
    assert [job.tokens for job in jobs] == [truth(prompt(n), 4) for n in (20, 6, 3)]
    assert max(most) == 2
    with pytest.raises(ArgumentError, match="prompt: expected at most 48 tokens"):
        engine(room=48).submit(Asked(prompt(45)))


def check_stop_elsewhere(rank: int) -> int:
    cp = ContextParallel(group(), scan="ring", validate="never")
    server = engine(cp)
    job = Asked(prompt(5))
    if rank == 0:
        server.submit(job)
    else:
        server.stop()
    server.run()
    return len(job.tokens)


def test_any_rank_may_be_told_to_stop(ranks):
    assert ranks.run(2, check_stop_elsewhere)[0] == 4


def test_of_several_prompts_the_shortest_is_read_first_and_none_waits_for_ever():
    server, pieces = engine(piece=4, batch=5), []
    read = server.model.read

    def noted(ids, states, cp):
        pieces.append(int(ids[0, 0]))
        return read(ids, states, cp)

    server.model.read = noted
    jobs = [Asked([mark] * n, 2) for mark, n in ((1, 24), (2, 12), (3, 3), (4, 12))]
    serve(server, jobs)
    assert pieces[:3] == [3, 2, 2]
    assert pieces[3] == 1  # came first
    assert pieces[4:] == [2, 4, 4, 1, 4, 1, 1, 1, 1]
    assert [job.tokens for job in jobs] == [truth(job.request.ids, 2) for job in jobs]


def test_others_get_several_tokens_between_two_pieces():
    server, pieces = engine(piece=4), []
    read, step = server.model.read, server.model.step

    def slow(ids, states, cp):
        pieces.append(ids.shape[1])
        time.sleep(0.2 if len(pieces) > 1 else 0)
        return read(ids, states, cp)

    def steady(tokens_, states, in_place):
        time.sleep(0.01)
        return step(tokens_, states, in_place)

    server.model.read, server.model.step = slow, steady
    beside, reading = Asked(prompt(3), 1000), Asked(prompt(20), 1)
    hear, between = beside.emit, []

    def emit(event: Event) -> None:
        hear(event)
        between.append(len(pieces))
        if reading.events:
            beside.cancel()

    beside.emit = emit
    serve(server, [beside, reading])
    assert reading.tokens == truth(prompt(20), 1)
    assert len(pieces) == 6
    assert min(between.count(n) for n in (2, 3, 4, 5)) >= 4
