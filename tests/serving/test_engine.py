"""Requests over several ranks get the tokens one process finds by reading the whole text again for every token."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_la import ArgumentError, Buckets, ContextParallel, UnsupportedError
from ring_la.capturing.surroundings import Surroundings
from ring_la.inference import key_store
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import LAYERS, seats
from ring_la.serving import (
    Bytes,
    Completion,
    Ended,
    Engine,
    Failed,
    Hybrid,
    HybridByBlock,
    Keep,
    Lookout,
    NewToken,
    NoText,
    Ranks,
    Request,
    Stream,
    Subwords,
    Waiting,
    static,
)
from ring_la.serving.static import StaticBatch
from ring_la.serving.waiting import Busy
from tests.serving import drawn
from tests.serving.engines import FIXED, LONG, SOME, Asked, engine, prompt, serve, truth
from tests.support.generation import make
from tests.support.pool import group

ASKED = [(1, 5), (23, 2), (2, 1), (12, 4)]
"""Lengths of prompts, and tokens wanted: they come and go at different times, two at once."""


def check_requests(rank: int, piece: int | None) -> list[list[int]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    jobs = [Asked(prompt(length), n) for length, n in ASKED]
    serve(engine(cp, (), piece=piece, batch=2), jobs)
    return [job.tokens for job in jobs]


@pytest.mark.parametrize(("size", "piece"), [(1, 9), (2, None), (3, 9)])
def test_requests_on_ranks(ranks, size, piece):
    assert ranks.run(size, check_requests, piece)[0] == [truth(prompt(length), n, ()) for length, n in ASKED]


def check_captured(rank: int) -> tuple[list[list[int]], int, int]:
    """Tokens, kinds of steps, and how many were taken before rank 0 knew their tokens."""
    cp, ahead = ContextParallel(group(), scan="ring", validate="never"), []
    jobs = [Asked(prompt(length), n) for length, n in ASKED] + [Asked(prompt(3), 6, temperature=2.0, seed=1)]
    go_ahead = StaticBatch.go_ahead
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "goes_ahead", lambda device: True)
        patch.setattr(StaticBatch, "go_ahead", lambda batch, send: ahead.append(1) or go_ahead(batch, send))
        serve(server := Engine(Hybrid(make(FIXED)), NoText(), cp, piece=9, batch=3, patience=LONG, capture=True), jobs)
    return [job.tokens for job in jobs], len(server.batch._step.kinds), len(ahead)


def test_a_step_over_states_of_fixed_addresses(ranks):
    want = [truth(prompt(length), n, FIXED) for length, n in ASKED]
    want.append(drawn.completion(make(FIXED), prompt(3), 6, temperature=2.0, seed=1))
    (got, kinds, ahead), *others = ranks.run(3, check_captured)
    assert got == want
    assert [n for *_, n in others] == [ahead, ahead]
    assert ahead >= max(n for _, n in ASKED)
    assert kinds <= 6  # one, two or four seats, of the same columns, with a drawn sequence or without
    for name in ("nsa", "dsa", "moba", "log_linear_mamba2"):
        others = tuple(kind for kind in LAYERS if kind != name)
        with pytest.raises(UnsupportedError, match="capture: expected False for a model with such a layer"):
            engine(without=others, capture=True)


def test_states_of_fixed_addresses_grow(monkeypatch):
    monkeypatch.setattr(static, "COLUMNS", 2)
    server = Engine(Hybrid(make(FIXED)), NoText(), batch=2, patience=LONG, capture=True)
    serve(server, jobs := [Asked(prompt(length), n) for length, n in ((1, 9), (2, 3), (7, 20))])
    for job, (length, n) in zip(jobs, ((1, 9), (2, 3), (7, 20)), strict=True):
        assert job.tokens == truth(prompt(length), n, FIXED)
    assert server.batch._keys.capacity == 32
    for n, columns in ((3, 4), (4096, 4096), (4097, 5120), (65536, 65536), (65537, 81920), (131071, 131072)):
        assert static.columns_for(n) == columns


BITS = ["gdn", "kda", "mamba2", "lightning", "attention"]


class StandIn:
    """A captured step in its looks: its surroundings are noted at the first call, and are to be so at each other."""

    graphs = 0

    def __init__(self, step: Callable[..., Any], cp: ContextParallel | None, buckets: Buckets) -> None:
        self.step, self.around = step, None

    def __call__(self, **arguments: Any) -> Any:
        if self.around is not None:
            self.around.check()
            return self.step(**arguments)
        self.around = Surroundings(self.step).snapshot()
        out = self.step(**arguments)
        self.around.close()
        return out

    def wait(self) -> None: ...

    def release(self) -> None: ...


def test_a_step_reads_nothing_from_around_it_that_another_changes(monkeypatch):
    monkeypatch.setattr(static, "capture", StandIn)
    server = Engine(Hybrid(make(SOME)), NoText(), batch=2, patience=LONG, capture=True)
    asked = [(3, 5), (9, 3), (2, 4)]
    serve(server, jobs := [Asked(prompt(length), n) for length, n in asked])
    assert [job.tokens for job in jobs] == [truth(prompt(length), n) for length, n in asked]


def bits_model(dtype: torch.dtype) -> HybridLM:
    options = {"mamba2": {"state_dim": 16}, "attention": {"num_kv_heads": 1}}
    torch.manual_seed(0)
    return HybridLM(HybridConfig(50, 48, BITS, 3, mlp_dim=33, options=options)).to(dtype)


def logprobs(job: Asked) -> list[float]:
    return [e.said.logprob for e in job.events if isinstance(e, NewToken)]


def check_bits(rank: int, size: int) -> list[tuple[list[int], list[float]]]:
    """Tokens, and how likely the model finds them, under a deterministic split."""
    cp, found = ContextParallel(group(size), validate="never", deterministic=True), []
    for dtype in (torch.float32, torch.bfloat16):
        model = bits_model(dtype)
        jobs = [Asked(prompt(n), 6, logprobs=1) for n in (5, 200)]
        serve(Engine(Hybrid(model), NoText(), cp, batch=2, patience=LONG), jobs)
        found += [(job.tokens, logprobs(job)) for job in jobs]
    return found


def test_a_deterministic_server_has_the_same_bits_on_any_number_of_ranks(ranks):
    one = ranks.run(1, check_bits, 1)[0]
    assert one[0][0] != one[1][0]
    for size in (2, 3, 4):
        assert ranks.run(size, check_bits, size)[0] == one, size


def check_samples(rank: int, size: int) -> list[tuple[list[int], list[float]]]:
    """Log-probabilities of sampled tokens as an engine tells them, read by blocks."""
    cp, told = ContextParallel(group(size), deterministic=True), []
    with pytest.raises(ArgumentError, match=r"^cp: expected one with deterministic=True"):
        HybridByBlock(bits_model(torch.float32), ContextParallel(group(size), scan="ring"))
    for dtype in (torch.float32, torch.bfloat16):
        engine = Engine(HybridByBlock(bits_model(dtype), cp), NoText(), cp, patience=LONG)
        jobs = [Asked(prompt(n), 6, logprobs=0, temperature=1.0, seed=n) for n in (5, 63, 200)]
        serve(engine, jobs)
        told += [(job.tokens, logprobs(job)) for job in jobs]
    return told


def check_training(rank: int, size: int, sampled: list[list[int]]) -> list[list[float]]:
    """The same of the forward pass of a step of training over all texts, packed."""
    cp, told = ContextParallel(group(size), deterministic=True), []
    for dtype, texts in ((torch.float32, sampled[:3]), (torch.bfloat16, sampled[3:])):
        whole = [prompt(n) + text for n, text in zip((5, 63, 200), texts)]
        ids, ends = torch.tensor([[*itertools.chain(*whole)]]), [*itertools.accumulate(map(len, whole))]
        layout = cp.layout(ends[-1], "zigzag", cu_seqlens=(0, *ends))
        local = bits_model(dtype)(layout.shard(ids), layout=layout).logits
        local.float().square().mean().backward()
        found = layout.gather(local.detach())[0].float().log_softmax(-1)
        for text, end in zip(texts, ends):
            told.append([float(found[end - len(text) - 1 + i, token]) for i, token in enumerate(text)])
    return told


def test_what_a_sampler_tells_is_what_a_trainer_finds(ranks):
    sampled = ranks.run(1, check_samples, 1)[0]
    for size in (2, 3):
        assert ranks.run(size, check_samples, size)[0] == sampled, size
    for size in (1, 2, 3):
        for told in ranks.run(size, check_training, size, [tokens_ for tokens_, _ in sampled]):
            assert told == [of for _, of in sampled], size


def check_sampling(rank: int) -> list[list[int]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    options = dict(temperature=1.5, top_k=9)
    jobs = [Asked(prompt(13), 8, seed=s, **options) for s in (3, 4, 3)] + [Asked(prompt(13), 8)]
    options |= dict(logit_bias={2: 4.0}, presence_penalty=0.5, frequency_penalty=0.5, logprobs=1)
    jobs.append(Asked(prompt(13), 8, seed=3, **options))
    serve(engine(cp), jobs)
    return [job.tokens for job in jobs]


def test_a_seed_gives_the_same_tokens_whoever_is_beside(ranks):
    got = ranks.run(2, check_sampling)[0]
    assert got == ranks.run(1, check_sampling)[0]
    for tokens_, seed in zip(got, (3, 4, 3)):
        assert tokens_ == drawn.completion(make(SOME), prompt(13), 8, temperature=1.5, top_k=9, seed=seed)
    more = dict(logit_bias={2: 4.0}, presence_penalty=0.5, frequency_penalty=0.5)
    assert got[4] == drawn.completion(make(SOME), prompt(13), 8, temperature=1.5, top_k=9, seed=3, **more)
    assert got[0] != got[1]
    assert got[0] != got[4]
    assert got[3] == truth(prompt(13), 8)


def test_the_end_of_a_text_ends_a_completion():
    want = truth(prompt(7), 6)
    at = next(i for i in range(1, 6) if want[i] not in want[:i])
    server = Engine(Hybrid(make(SOME)), NoText(frozenset({want[at]})), patience=LONG)
    serve(server, [job := Asked(prompt(7), 6)])
    assert job.tokens == want[:at]
    assert job.events[-1] == Ended("stop", "", 7, 0, at + 1)
    serve(engine(), [job := Asked(prompt(7), 6)])
    assert job.events[-1] == Ended("length", "", 7, 0, 6)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "^prompt: expected at least one token"),
        (Request([3, 19]), "^prompt: expected token ids from 0 to 18, got 19"),
        (Request([3] * 30, 11), r"^prompt: expected at most 40 tokens together with max_tokens, got 30 \+ 11"),
        (Request([3], 0), "^max_tokens: expected"),
        (Request([3], temperature=-1), "^temperature: expected"),
        (Request([3], stop=("x",)), "^stop: expected nothing for a model without a tokenizer"),
        (Request([3], stop="xy"), "^stop: expected a tuple of strings, none of them empty, got 'xy'"),
        (Request([3], stop=("",)), "^stop: expected a tuple of strings, none of them empty"),
        (Request([3], logprobs=True), "^logprobs: expected an int"),
        (Request([3], presence_penalty=float("inf")), "^presence_penalty: expected a finite number"),
        (Request([3], stop=(1,)), "^stop: expected a tuple of strings, none of them empty"),
    ],
)
def test_what_cannot_be_completed(request_, message):
    with pytest.raises(ArgumentError, match=message):
        engine(max_tokens=40).submit(Completion(request_, print))


def test_what_makes_no_server_is_named():
    model = make(SOME)
    served, request = Hybrid(model), Request([3])
    cp = SimpleNamespace(size=1, deterministic=True)
    wrong = [("model", model), ("model", None), ("text", None), ("text", "bytes"), ("cp", 2), ("capture", "yes")]
    wrong += [("keep", True), ("keep", Keep(disk=1, folder=3)), ("batch", True), ("waiting", 0), ("room", True)]
    for name, value in (*wrong, ("patience", True)):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            Engine(**{"model": served, "text": NoText()} | {name: value})
    calls = {
        "model": [lambda: Hybrid(torch.nn.Linear(2, 2)), lambda: Hybrid(None)],
        "cp": [lambda: HybridByBlock(model, None), lambda: HybridByBlock(model, cp), lambda: Ranks(2)],
        "weights": [lambda: Hybrid(model, "half")],
        "engine": [lambda: Lookout(None, None)],
        "most": [lambda: Waiting(0), lambda: Waiting(None)],
        "request": [lambda: Completion([3], print)],
        "prompt": [lambda: Completion(Request(None), print), lambda: Completion(Request(3), print)],
        "emit": [lambda: Completion(request, None)],
        "jobs": [lambda: engine().submit(request), lambda: engine().submit([Completion(request, print)])],
        "end": [lambda: NoText(2), lambda: Bytes(257, [2]), lambda: NoText({"2"}), lambda: NoText(None)],
        "vocab_size": [lambda: Bytes("257"), lambda: Bytes(None)],
        "encode": [lambda: Subwords(None, str, frozenset())],
        "template": [lambda: Subwords(list, str, frozenset(), "chatml")],
        "stop": [lambda: Stream(NoText().decoder(), "stop"), lambda: Stream(NoText().decoder(), None)],
    }
    for name, each in calls.items():
        for call in each:
            with pytest.raises(ArgumentError, match=f"^{name}: expected"):
                call()


KEYED = tuple(name for name in LAYERS if name not in ("gdn", "attention", "fox", "mla"))


def check_all_decode(rank: int) -> tuple[list[list[int]], int, list[int]]:
    """Two sequences, whose first step at once fails on all ranks; then a long one and a short one."""
    cp = ContextParallel(group(), scan="ring", validate="never")
    server, most, failed = engine(cp, KEYED, batch=2), [], []
    step = server.model.step

    def broken(tokens_, states, in_place):
        out = step(tokens_, states, in_place)
        most.append(next(state.rows for state in states if hasattr(state, "rows")).nbytes)
        if len(tokens_) == 2 and not failed:
            failed.append(True)
            raise RuntimeError("two at once")
        return out

    server.model.step = broken
    jobs = [Asked(prompt(4), 5), Asked(prompt(5), 5), Asked(prompt(120), 3), Asked(prompt(2), 6)]
    gc.disable()  # what a failed step leaves goes without it
    try:
        serve(server, jobs)
        left = server.model._keys.nbytes
    finally:
        gc.enable()
    failures = sum(isinstance(job.events[-1], Failed) for job in jobs if job.events)
    return [job.tokens for job in jobs], left, [max(most), failures]


def test_all_ranks_decode_from_their_own_keys(ranks):
    found = ranks.run(3, check_all_decode)
    tokens_, _, (_, failed) = found[0]
    assert failed == 2
    assert tokens_[2:] == [truth(prompt(120), 3, KEYED), truth(prompt(2), 6, KEYED)]
    most = key_store(make(KEYED)).token_bytes * ((120 + 3) / 3 + 5)
    assert max(bytes_ for _, _, (bytes_, _) in found) <= most
    assert [left for _, left, _ in found] == [0, 0, 0]


def test_sequences_of_any_length_are_decoded_side_by_side(monkeypatch):
    monkeypatch.setattr(seats, "ALONE", 24)
    monkeypatch.setattr(seats, "SMALLEST", 4)
    asked = [(30, 9), (3, 12), (22, 7), (5, 3), (1, 20), (7, 2)]
    jobs = [Asked(prompt(length), n) for length, n in asked]
    serve(engine(without=KEYED, batch=4), jobs)
    assert [job.tokens for job in jobs] == [truth(prompt(length), n, KEYED) for length, n in asked]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ids": [1.5, 2.0]}, "prompt: expected token ids, ints, got 1.5 among them"),  # it ended the engine
        ({"ids": ["a"]}, "prompt: expected token ids"),
        ({"ids": [[1, 2]]}, "prompt: expected token ids"),
        ({"ids": [True]}, "prompt: expected token ids"),
        ({"max_tokens": 2.5}, "max_tokens: expected an int"),  # three tokens
        ({"max_tokens": None}, "max_tokens: expected an int"),
        ({"seed": "x"}, "seed: expected an int"),
        ({"seed": 2**70}, "seed: expected an int"),
        ({"logit_bias": {1: "x"}}, "logit_bias: expected a number"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: expected a number"),
        ({"logit_bias": [1]}, "logit_bias: expected a number"),
    ],
)
def test_what_is_no_request_is_refused_at_once(wrong, named):
    with pytest.raises(ArgumentError, match=named):
        engine().submit(Asked(**{"ids": [1, 2], **wrong}))


def test_a_request_is_submitted_once_and_one_thread_runs():
    """Both got tokens of the other, or none."""
    server, job, late = engine(waiting=1), Asked([1, 2], 3), Asked([3], 1)
    server.submit(job)
    with pytest.raises(Busy):
        server.submit(late)
    for jobs in ([job], [Asked([1, 2])] * 2):
        with pytest.raises(ArgumentError, match="jobs: expected requests of which each is submitted once"):
            server.submit(*jobs)
    running = threading.Thread(target=server.run)
    running.start()
    while len(job.tokens) < 3:
        time.sleep(0.01)
    with pytest.raises(ArgumentError, match="run: expected one thread"):
        server.run()
    server.submit(late)
    server.stop()
    running.join()
    assert (job.tokens, late.tokens) == (truth([1, 2], 3), truth([3], 1))
