"""A server that decodes by `ring_la.capture`, with graphs of a stand-in."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ring_la.capturing import CapturedStep
from ring_la.models import hybrid
from ring_la.serving import Engine, NoText, static
from ring_la.serving.ahead import OnTheWay
from ring_la.serving.pretrained import Pretrained
from ring_la.serving.sampling import Choosers
from ring_la.serving.static import StaticBatch
from tests.support.generation import make
from tests.support.step_graphs import Apart, Recorded, standing

from . import drawn
from .engines import SOME, Asked, engine, prompt, serve, truth


def test_decoding_in_a_server(monkeypatch):
    """Sequences that come and go between steps: nothing of it is the graph's."""
    standing(monkeypatch.setattr, Recorded)
    jobs = [Asked(prompt(n), 12) for n in (5, 9, 3, 7)]
    served = engine(batch=2, capture=True)
    serve(served, jobs)
    assert [job.tokens for job in jobs] == [truth(job.request.ids, 12) for job in jobs]
    assert served.batch.graphs >= 1


def test_a_step_is_launched_before_the_host_knows_its_tokens(monkeypatch):
    """Greedy and sampled sequences that come, end, stop and are cancelled: tokens are those of steps that wait, and
    each but the last is told while the next step is under way."""
    standing(monkeypatch.setattr, Recorded)
    want = [truth(prompt(n), 12) for n in (5, 9, 3, 7)]
    order: list[str] = []
    there, launched = OnTheWay.there, StaticBatch._take

    def waits(x: OnTheWay, *step: CapturedStep) -> torch.Tensor:
        order.extend(["told"] * (order[-1:] != ["told"]))
        return there(x, *step)

    monkeypatch.setattr(OnTheWay, "there", waits)
    monkeypatch.setattr(StaticBatch, "_take", lambda x, tokens: order.append("step") or launched(x, tokens))

    def served(ahead: bool, **options) -> list[Asked]:
        monkeypatch.setattr(static, "goes_ahead", lambda *_: ahead)
        jobs = [Asked(prompt(n), k, **options) for n, k in ((5, 12), (9, 1), (3, 8), (7, 12))]
        order.clear()
        serve(engine(batch=2, capture=True), jobs)
        return jobs

    jobs = served(ahead=True)
    assert [job.tokens for job in jobs] == [x[: job.request.max_tokens] for x, job in zip(want, jobs)]
    assert order == ["step", "told"] * (len(order) // 2)
    options = dict(temperature=1.3, seed=4, logprobs=2, frequency_penalty=0.5)
    waited = served(ahead=False, **options)
    assert order[:2] == ["told", "step"]
    jobs = served(ahead=True, **options)
    assert [job.events for job in jobs] == [job.events for job in waited]
    assert order[:2] == ["step", "told"]


def test_what_is_drawn_is_chosen_within_the_graph(monkeypatch):
    """Greedy, drawn and changed rows side by side: each gets the tokens of its definition, and the host, that runs no
    Python in a replay, chooses where a prompt joins and where a graph is made, and in no other step."""
    standing(monkeypatch.setattr, Recorded)
    monkeypatch.setattr(static, "goes_ahead", lambda *_: True)
    asked, calls, launched = [], Counter(), StaticBatch._take
    for n, k, options in (
        (5, 30, {}),
        (9, 30, dict(temperature=1.3, seed=4)),
        (3, 12, dict(temperature=0.9, seed=5, top_k=9, top_p=0.8)),
        (7, 8, dict(temperature=0.9, seed=4, frequency_penalty=0.5, logit_bias={2: 3.0})),
    ):
        asked.append((Asked(prompt(n), k, **options), drawn.completion(make(SOME), prompt(n), k, **options)))
    choose = Choosers.choose
    monkeypatch.setattr(Choosers, "choose", lambda x, *given, **by: calls.update("c") or choose(x, *given, **by))
    monkeypatch.setattr(StaticBatch, "_take", lambda x, tokens: calls.update("s") or launched(x, tokens))
    for name in ("_warm", "_capture"):
        ran = getattr(CapturedStep, name)
        monkeypatch.setattr(CapturedStep, name, lambda *given, ran=ran: calls.update("p") or ran(*given))
    served = engine(batch=3, capture=True)
    serve(served, [job for job, _ in asked])
    for job, want in asked:
        assert job.tokens == want, job.events[-1]
    assert served.batch.graphs >= 2
    assert calls["c"] == len(asked) + calls["p"]
    assert calls["s"] > calls["p"]


def test_no_step_is_launched_beyond_the_memory(monkeypatch):
    """Sequences that outgrow their columns: the step that needs more memory is not launched before it is there."""
    standing(monkeypatch.setattr, Recorded)
    monkeypatch.setattr(static, "goes_ahead", lambda *_: True)
    monkeypatch.setattr(static, "COLUMNS", 8)
    jobs = [Asked(prompt(5), 8), Asked(prompt(3), 12)]
    serve(engine(batch=2, capture=True), jobs)
    assert [job.tokens for job in jobs] == [truth(job.request.ids, job.request.max_tokens) for job in jobs]


def test_a_step_ahead_waits_for_nothing(monkeypatch):
    """Choosing tokens, greedy or drawn, and launching the step behind them, of sequences with seats in any order."""
    standing(monkeypatch.setattr, Recorded)
    monkeypatch.setattr(static, "goes_ahead", lambda *_: True)
    monkeypatch.setattr(hybrid, "check_tokens", lambda *_: None)  # which looks at a CPU's tokens alone
    seats: list[tuple[int, ...]] = []
    choose, go_ahead = StaticBatch.choose, StaticBatch.go_ahead

    def apart(call):
        def within(batch, *arguments):
            seats.append(tuple(batch._seats))
            with Apart():
                return call(batch, *arguments)

        return within

    monkeypatch.setattr(StaticBatch, "choose", apart(choose))
    monkeypatch.setattr(StaticBatch, "go_ahead", apart(go_ahead))
    options = dict(temperature=1.3, seed=4, logprobs=2, frequency_penalty=0.5, top_k=9, top_p=0.9)
    for given in ({}, options):
        jobs = [Asked(prompt(n), k, **given) for n, k in ((5, 3), (9, 12), (3, 12), (7, 9), (4, 3))]
        serve(engine(batch=3, capture=True), jobs)
        assert [len(job.tokens) for job in jobs] == [3, 12, 12, 9, 3], [job.events[-1] for job in jobs]
        if not given:
            assert [job.tokens for job in jobs] == [truth(job.request.ids, job.request.max_tokens) for job in jobs]
    assert any(each != tuple(range(len(each))) for each in seats)


def test_seats_that_nobody_has_stay_where_they_are(monkeypatch):
    """Their place in a sequence is one that every model knows, and they read no keys."""
    jobs = [Asked(prompt(9), 3), *(Asked(prompt(n), 12) for n in (5, 3, 4))]
    served = engine(batch=8, capture=True)
    serve(served, jobs[:3])
    assert served.batch._keys.length.tolist() == served.batch._keys.here.tolist() == 4 * [0]
    assert [job.tokens for job in jobs[:3]] == [truth(job.request.ids, job.request.max_tokens) for job in jobs[:3]]


def test_a_seat_that_nobody_has_is_at_a_place_that_the_model_knows():
    """Behind as many steps as there are places: of a table of them a GPU would end the process."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_positions=12, n_embd=16, n_layer=1, n_head=2, eos_token_id=None)
    served = Pretrained(transformers.GPT2LMHeadModel(config), None)
    jobs = [Asked([1, 2, 3], n) for n in (2, 9, 9, 9)]
    serve(Engine(served, NoText(), batch=3, capture=True, patience=60), jobs)
    assert [len(job.tokens) for job in jobs] == [2, 9, 9, 9], [job.events[-1] for job in jobs]
    assert jobs[1].tokens == jobs[2].tokens == jobs[3].tokens
