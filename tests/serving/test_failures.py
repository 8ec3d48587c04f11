"""What fails alone, and what ends the server: on one rank, on all, and by a rank that dies."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import threading
import time

import pytest
import torch

from ring_la import ContextParallel, DisagreementError, PeerError
from ring_la.serving import Completion, Event, Failed, Hybrid, Lookout, NewToken, Request
from ring_la.serving.model import rehearse
from ring_la.serving.ranks import What
from tests.serving.engines import SOME, Asked, broken_at, engine, prompt, serve, truth
from tests.support.generation import make
from tests.support.pool import group


def test_a_result_that_is_not_finite_fails_its_request_and_not_the_server():
    server = engine(batch=2)
    read = server.model.read

    def broken(ids, states, cp):
        out = read(ids, states, cp)
        return out._replace(logits=out.logits.masked_fill(ids[:, -1:] == 3, torch.nan))

    server.model.read = broken
    unchosen = Asked([5], temperature=1.0, logit_bias={1: math.inf})
    serve(server, jobs := [Asked([1, 3]), Asked([5]), Asked([3], temperature=1.0), Asked([6]), unchosen, Asked([7])])
    assert [job.events for job in jobs[::2]] == 3 * [[Failed("the model's result is not finite")]]
    assert [job.tokens for job in jobs[1::2]] == [truth([5], 4), truth([6], 4), truth([7], 4)]


def check_death(rank: int) -> tuple[str, str, list[str]]:
    """While all ranks decode a sequence, of which the last knows no more than its states. And what the engine
    does then, one after the other."""
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=2)
    server, steps, done = engine(cp), [], []
    give_up, clear = cp.comm.give_up, server.batch.clear
    cp.comm.give_up = lambda error: (done.append("gives messages up"), give_up(error))
    server.batch.clear = lambda: (done.append(f"waits for the device, {len(job.events)} events told"), clear())
    step, said = server.model.step, io.StringIO()
    logging.getLogger("ring_la.serving").addHandler(handler := logging.StreamHandler(said))

    def dying(*arguments, **keywords):
        steps.append(True)
        if rank == 2 and len(steps) == 3:
            os._exit(1)
        return step(*arguments, **keywords)

    server.model.step = dying
    job = Asked(prompt(5), 100_000)
    if rank == 0:
        server.submit(job)
    try:
        server.run()
    except PeerError as error:
        assert "Traceback" not in said.getvalue()
        return str(error), str(job.events[-1:]), [*done, f"{len(job.events)} events"]
    finally:
        logging.getLogger("ring_la.serving").removeHandler(handler)
    raise AssertionError("nobody died")


def test_a_rank_that_dies_ends_the_server(ranks):
    leader, follower = ranks.run(3, check_death, dying=(2,))
    assert "no sign of life from rank 2" in leader[0]
    assert "no sign of life from rank 2" in follower[0]
    assert "the server has failed (PeerError)" in leader[1]
    told = leader[2][-1]
    assert leader[2] == ["gives messages up", f"waits for the device, {told} told", told]
    assert follower[2][:2] == ["gives messages up", "waits for the device, 0 events told"]


def check_one_fails(rank: int) -> list[tuple[list[int], str]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    server = engine(cp, piece=4, batch=2, keep=1 << 20)
    broken_at(server, 3)
    jobs = [Asked([5], 9), Asked([5, 6, 7, 8, 3]), Asked([6, 5])]
    serve(server, jobs)
    assert not server.states.open
    return [(job.tokens, str(job.events[-1])) for job in jobs] if rank == 0 else []


@pytest.mark.parametrize("size", [1, 2])
def test_a_request_that_fails_on_all_ranks_fails_alone(ranks, size):
    good, bad, other = ranks.run(size, check_one_fails)[0]
    assert good[0] == truth([5], 9)
    assert bad == ([], str(Failed("the request has failed (RuntimeError)")))
    assert other[0] == truth([6, 5], 4)


def check_one_rank_fails(rank: int) -> tuple[str, str]:
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=5)
    server = engine(cp)
    if rank == 1:
        broken_at(server, 3, after=True)
    job = Asked([5, 6, 7, 3])
    if rank == 0:
        server.submit(job)
    with pytest.raises(DisagreementError) as error:
        server.run()
    return str(error.value), str(job.events[-1:])


def test_a_request_that_fails_on_one_rank_ends_the_server_on_all(ranks):
    leader, follower = ranks.run(2, check_one_rank_fails)
    assert leader[0] == follower[0]
    assert "rank 1: RuntimeError: no such prompt" in leader[0]
    assert "the server has failed (DisagreementError)" in leader[1]


def check_lost_count(rank: int, moment: str) -> tuple[str, list[str]]:
    """Rank 1 does something else than it was told: reads two tokens more, takes a step of one sequence less, or starts
    from a state that it does not have."""
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=5)
    server, jobs = engine(cp, piece=16, batch=2), [Asked([5, *prompt(39)], 200), Asked(prompt(9), 200)]
    do = server.states.do

    def other(word, *more):
        if rank == 1 and word.what == What.READ and word.start and moment == "read":
            word = word._replace(ids=torch.cat([word.ids, word.ids[:2]]))
        elif rank == 1 and word.what == What.READ and word.start and moment == "start":
            del server.states.open[word.start]
        elif rank == 1 and word.what == What.STEP and moment == "step" and len(server.batch.rows) == 2:
            server.batch.keep([0])
            word = word._replace(ids=word.ids[:1])
        return do(word, *more)

    server.states.do = other
    with pytest.raises(DisagreementError) as error:
        serve(server, jobs)
    return str(error.value), [str(job.events[-1]) for job in jobs if job.events]


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("read", ("READ", r"tokens=16", r"tokens=18")),
        ("start", ("READ", r"after=\[16\]", r"after=what is not here")),
        ("step", ("STEP", r"decoded=\[\d+, \d+\]", r"decoded=\[\d+\]")),
    ],
)
def test_a_rank_that_does_something_else_is_named_on_all(ranks, moment, said):
    found = ranks.run(3, check_lost_count, moment, dying=())
    ranks.stop()  # their messages are half exchanged
    assert len({error for error, _ in found}) == 1
    what, right, other = said
    assert f"disagree on a server's {what}:" in found[0][0]
    assert re.search(rf"rank 0: .*{right}.*\n  rank 1: .*{other}.*\n  rank 2: .*{right}", found[0][0])
    assert found[0][1] == 2 * [str(Failed("the server has failed (DisagreementError)"))]


def check_other_weights(rank: int, odd: int) -> None:
    model = make(SOME)
    rehearse(Hybrid(model), cp := ContextParallel(group(), scan="ring", validate="never", timeout=5))
    if rank == odd:
        model.blocks[0].layer_norm.weight.data[0] += 0.125
    rehearse(Hybrid(model), cp)


def test_ranks_with_other_weights_do_not_serve(ranks):
    ranks.run(2, check_other_weights, 2)
    with pytest.raises(AssertionError, match=r"disagree on the model that is served:\n.*weights="):
        ranks.run(2, check_other_weights, 1)


def check_stuck(rank: int) -> tuple[str, list[dict[str, dict[int, float]]]]:
    """Rank 1 never comes back from its third step, alive; what rank 0's lookout says meanwhile."""
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=2)
    server, job, steps, seen = engine(cp), Asked(prompt(5), 100_000), [], []
    step, ended = server.model.step, threading.Event()

    def stuck(*arguments, **keywords):
        steps.append(True)
        if rank == 1 and len(steps) == 3:
            time.sleep(6)
        return step(*arguments, **keywords)

    def look(lookout: Lookout) -> None:
        while not ended.wait(0.1):
            seen.append(lookout.stalled(1.0))

    server.model.step = stuck
    if rank == 0:
        server.submit(job)
    with Lookout(server, cp) as lookout:
        threading.Thread(target=look, args=(lookout,)).start()
        with pytest.raises(PeerError) as error:
            server.run()
        ended.set()
    assert rank or job.events[-1] == Failed("the server has failed (PeerError)")
    return str(error.value), [said for said in seen if said]


def test_a_rank_that_is_stuck_is_seen_and_named(ranks):
    leader, _, other = ranks.run(3, check_stuck, dying=())
    ranks.stop()
    for error, _ in (leader, other):
        assert "no sign of life from rank 1 (global rank 1). " in error
    assert [1] in [list(said.get("awaited_ranks", ())) for said in leader[1]]  # by number; none while all get on


def test_errors_while_decoding_end_their_requests_alone():
    server, seen = engine(batch=3), []
    step = server.model.step

    def broken(tokens_, states, in_place):
        if len(tokens_) == 2:
            raise RuntimeError("two at once")
        return step(tokens_, states, in_place)

    def deaf(event: Event) -> None:
        seen.append(event)
        raise RuntimeError("no ears")

    server.model.step = broken
    deaf_one, pair, last = Completion(Request(prompt(4), 5), deaf), [Asked(prompt(5)), Asked(prompt(6))], Asked([7])
    for job in (deaf_one, *pair):
        server.submit(job)
    hear = pair[1].emit

    def then(event: Event) -> None:
        hear(event)
        if isinstance(event, Failed):
            server.submit(last)
            server.stop()

    pair[1].emit = then
    server.run()
    assert isinstance(seen[0], NewToken)
    assert [job.events[-1] for job in pair] == 2 * [Failed("the request has failed (RuntimeError)")]
    assert last.tokens == truth([7], 4)
