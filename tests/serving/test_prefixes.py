"""Prompts that begin alike are read from where they part, and what is kept for that grows with the tokens."""

from __future__ import annotations

import torch

from ring_la import ContextParallel
from ring_la.serving import Batch, Hybrid
from ring_la.serving.batch import Row
from tests.serving.engines import SOME, Asked, engine, memory, prompt, serve, truth, truth_of
from tests.support.generation import make, tokens
from tests.support.pool import group


def check_turns(rank: int) -> list[tuple[list[int], int, int]]:
    """A conversation of three turns, a prompt that begins like it, and one asked again."""
    cp = ContextParallel(group(), scan="ring", validate="never")
    ids = prompt(40)
    asked = [ids[:9], ids[:25], ids[:40], ids[:12] + ids[:3], ids[:9]]
    jobs = [Asked(x, 3) for x in asked]
    server = engine(cp, (), piece=8, batch=1, keep=1 << 20)
    serve(server, jobs)
    assert set(server.states.kept) == {e.key for e in server._prefixes._entries.values()} or rank > 0
    assert not server.states.open
    return [(job.tokens, job.events[-1].reused_tokens, len(server.states.kept)) for job in jobs] if rank == 0 else []


def test_prompts_that_begin_alike_are_read_from_there(ranks):
    ids = prompt(40)
    got = ranks.run(2, check_turns)[0]
    asked = ids[:9], ids[:25], ids[:40], ids[:12] + ids[:3], ids[:9]
    assert [t for t, _, _ in got] == [truth(x, 3, ()) for x in asked]
    assert [reused for _, reused, _ in got] == [0, 9, 25, 9, 9]


def test_states_that_do_not_fit_leave_again():
    ids = prompt(40)
    one = engine(keep=1 << 20)
    serve(one, [Asked(ids)])
    size = one._prefixes.sizes[0]
    jobs = [Asked(ids), Asked(ids[::-1]), Asked(ids[::-1]), Asked(ids)]
    few = engine(keep=size + size // 2, batch=1)
    serve(few, jobs)
    assert [job.events[-1].reused_tokens for job in jobs] == [0, 0, 40, 0]
    assert len(few.states.kept) == 1
    none = engine(batch=1)
    serve(none, jobs := [Asked(ids), Asked(ids)])
    assert jobs[1].events[-1].reused_tokens == 0
    assert not none.states.kept


def test_one_document_and_two_questions():
    document, questions = tokens(1, 1500)[0].tolist(), [[3, 4, 5], [6, 7, 8, 9], [10, 11]]
    short = document[:700] + questions[0]  # begins alike, and ends elsewhere
    jobs = [Asked(document + q, 3) for q in questions[:2]] + [Asked(short, 3), Asked(document[:600], 3)]
    server = engine(batch=1, keep=1 << 30)
    serve(server, jobs)
    assert [job.events[-1].reused_tokens for job in jobs] == [0, 1024, 0, 512]
    assert [job.tokens for job in jobs] == [truth_of(job) for job in jobs]


def test_kept_states_grow_with_the_tokens():
    ids = tokens(1, 256)[0].tolist()
    sizes = []
    for length in (128, 256):
        server = engine(batch=1, piece=8, keep=1 << 30)
        serve(server, [Asked(ids[:length], 1)])
        sizes.append(memory(server.states.kept))
    assert sizes[1] < 2.1 * sizes[0]
    small = engine(batch=1, piece=8, keep=sizes[0])
    serve(small, jobs := [Asked(ids, 1), Asked(ids, 1)])
    assert 64 <= jobs[1].events[-1].reused_tokens < 256  # the beginning of what does not fit
    assert jobs[0].tokens == jobs[1].tokens
    assert memory(small.states.kept) <= sizes[0]


def test_a_long_sequence_costs_short_ones_nothing():
    model = Hybrid(make(SOME))
    prompts = [model.read(torch.tensor([prompt(n)]), None, None) for n in (2000, 3, 7, 20, 300, 2, 9, 4)]
    apart = sum(memory(p.states) for p in prompts)
    batch = Batch(model)
    for p in prompts:
        batch.add(Row(), p)
    assert memory(batch._after.states) < 1.5 * apart
