"""The engine on GPUs, its prompts read by one rank, by two and by four: `pytest -m gpu tests/gpu/test_serving.py`.

Its times: benchmarks/serving.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from ring_la import ContextParallel
from ring_la.inference import generate, sharded_weights
from ring_la.integrations.transformers.sharded import shard_weights
from ring_la.serving import Engine, Hybrid, NoText
from ring_la.serving.load import sharded_hybrid
from ring_la.serving.memory import fitting
from ring_la.serving.pretrained import Pretrained
from ring_la.serving.static import StaticBatch
from ring_la.softmax.products import product
from tests.support import pool
from tests.support.pool import Ranks
from tests.support.serving import GIB, Timed, answer, make, prompt
from tests.support.transformers_models import CASES, VOCABULARY

RANKS = [pytest.param(P, id=f"P{P}", marks=pytest.mark.gpu(needs=P)) for P in (1, 2, 4)]


@pytest.fixture(scope="module")
def servers(request) -> Iterator[Ranks]:
    """P ranks that are all of their job, as an engine wants them."""
    ranks = Ranks(request.param, "nccl")
    yield ranks
    ranks.stop()


def check_tokens(rank: int) -> list[tuple[list[int], list[int]]] | None:
    """(tokens served, those of `generate`) of each request, on the rank that leads: an fp32 model whose prompts are
    read in pieces, decoded as a batch and go on from kept states."""
    cp = ContextParallel(pool.group(), validate="never")
    model = make(256, 4, ["gdn", "kda", "mamba2", "attention"], torch.float32)
    asked = [(1, 20), (3000, 9), (37, 15), (5000, 12), (3000, 9)]
    jobs = [Timed(prompt(length), n) for length, n in asked]
    if answer(Engine(Hybrid(model), NoText(), cp, piece=1024, batch=3, keep=GIB, patience=90), jobs) is None:
        return None
    want = [generate(model, torch.tensor([prompt(length)], device="cuda"), n)[0].tolist() for length, n in asked]
    return [(each.tokens, tokens) for each, tokens in zip(jobs, want, strict=True)]


@pytest.mark.parametrize("servers", RANKS, indirect=True)
def test_tokens(servers):
    (found,) = [x for x in servers.run(servers.size, check_tokens) if x is not None]
    assert [served for served, _ in found] == [generated for _, generated in found]
    assert [len(served) for served, _ in found] == [20, 9, 15, 12, 9]


def told(model: torch.nn.Module, asked: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Tokens of `generate` after prompts of some lengths."""
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    want = []
    for length, n in asked:
        ids = torch.tensor([prompt(length)], device="cuda") % VOCABULARY
        all_of_it = torch.ones_like(ids)  # else tokens that are the padding's are left out
        made = model.generate(ids, attention_mask=all_of_it, max_new_tokens=n, do_sample=False)
        want.append(made[0, length:].tolist())
    return want


def check_transformers(rank: int) -> list[tuple[list[int], list[int]]] | None:
    """(tokens served, those of `generate`) of each request to a Qwen3-Next whose sequences are rows."""
    cp = ContextParallel(pool.group(), validate="never", timeout=60)
    model = CASES["qwen3_next"].make().eval().cuda()
    want = told(model, asked := [(1, 20), (90, 9), (37, 15), (70, 12)])
    served = Pretrained(model, cp)
    assert (served.flexible, served.resumes, served.goes_on) == (True, True, True)
    jobs = [Timed([token % VOCABULARY for token in prompt(length)], n) for length, n in asked]
    engine = Engine(served, NoText(), cp, piece=32, batch=3, keep=GIB, patience=90)
    return None if answer(engine, jobs) is None else [(each.tokens, x) for each, x in zip(jobs, want, strict=True)]


@pytest.mark.parametrize("servers", RANKS, indirect=True)
def test_models_of_transformers(servers):
    (found,) = [x for x in servers.run(servers.size, check_transformers, timeout=240) if x is not None]
    assert [served for served, _ in found] == [generated for _, generated in found]


def check_steps(rank: int, name: str) -> tuple[list[tuple[list[int], ...]], int, dict[str, float]] | None:
    """(tokens served by graphs, by plain steps, those of `generate`) of each request to a mixture, whose weights are in
    parts where there are several ranks; the graphs, and milliseconds a token of each way."""
    cp = ContextParallel(pool.group(), validate="never", timeout=60)
    model = CASES[name].make().eval().cuda()
    want = told(model, asked := [(1, 30), (40, 12), (13, 20)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_weights, "LEAST", 512)
        weights = shard_weights(model, cp)
    if weights is not None:
        weights.settle(model)
    served, tokens, times, graphs = Pretrained(model, cp), {}, {}, 0
    for captured in (False, True):
        jobs = [Timed([token % VOCABULARY for token in prompt(length)], n) for length, n in asked]
        engine = Engine(served, NoText(), cp, batch=2, patience=90, capture=captured)
        assert isinstance(engine.batch, StaticBatch) == captured
        if answer(engine, jobs) is not None:
            tokens[captured] = [each.tokens for each in jobs]
            gaps = [b - a for each in jobs for a, b in zip(each.times, each.times[1:])]
            times["captured" if captured else "plain"] = 1000 * sorted(gaps)[len(gaps) // 2]
        graphs = engine.batch.graphs
    return (list(zip(tokens[True], tokens[False], want, strict=True)), graphs, times) if tokens else None


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "kimi_linear"])
@pytest.mark.parametrize("servers", RANKS, indirect=True)
def test_steps_of_models_of_transformers_that_are_one_graph(servers, name, record_property):
    [(found, graphs, times)] = [x for x in servers.run(servers.size, check_steps, name, timeout=120) if x is not None]
    record_property("milliseconds a token", times)
    assert [captured for captured, _, _ in found] == [generated for *_, generated in found]
    assert [plain for _, plain, _ in found] == [generated for *_, generated in found]
    assert graphs >= 1


def check_captured(rank: int) -> tuple[list[tuple[list[int], list[int]]], int, dict[str, float]] | None:
    """(tokens served by graphs, those of plain steps) of each request, the graphs, and milliseconds a token of each."""
    cp = ContextParallel(pool.group(), validate="never", timeout=60)
    model = make(256, 4, ["gdn", "fox", "mamba2", "attention"], torch.float32)
    asked, tokens, times, graphs = [(1, 200), (300 * cp.size, 90), (37, 150), (3, 120)], {}, {}, 0
    for captured in (False, True):
        jobs = [Timed(prompt(length), n) for length, n in asked]
        engine = Engine(Hybrid(model), NoText(), cp, batch=3, patience=90, capture=captured)
        if answer(engine, jobs) is not None:
            tokens[captured] = [each.tokens for each in jobs]
            gaps = [b - a for each in jobs for a, b in zip(each.times, each.times[1:])]
            times["captured" if captured else "plain"] = 1000 * sorted(gaps)[len(gaps) // 2]
        graphs = engine.batch.graphs
    if not tokens:
        return None
    return list(zip(tokens[True], tokens[False], strict=True)), graphs, times


@pytest.mark.parametrize("servers", RANKS, indirect=True)
def test_a_step_that_is_one_graph(servers, record_property):
    [(found, graphs, times)] = [x for x in servers.run(servers.size, check_captured, timeout=240) if x is not None]
    record_property("milliseconds a token", times)
    assert [captured for captured, _ in found] == [plain for _, plain in found]
    assert 2 <= graphs <= 6  # one, two and three seats; 256 columns a rank, then 512


def check_sharded(rank: int) -> list[tuple[list[int], list[int], list[int]]] | None:
    """(tokens served by graphs, by plain steps, those of `generate` with whole weights) of each request to a `HybridLM`
    whose weights are in parts where there are several ranks."""
    cp = ContextParallel(pool.group(), validate="never", timeout=60)
    model, tokens = make(256, 4, ["gdn", "mamba2", "attention"], torch.float32), {}
    asked = [(1, 30), (40, 12), (13, 20)]
    want = [generate(model, torch.tensor([prompt(length)], device="cuda"), n)[0].tolist() for length, n in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_weights, "LEAST", 4096)
        served = Hybrid(model) if cp.size == 1 else sharded_hybrid(model, cp)
    for captured in (False, True):
        jobs = [Timed(prompt(length), n) for length, n in asked]
        if answer(Engine(served, NoText(), cp, batch=2, patience=60, capture=captured), jobs) is not None:
            tokens[captured] = [each.tokens for each in jobs]
    return list(zip(tokens[True], tokens[False], want, strict=True)) if tokens else None


@pytest.mark.parametrize("servers", RANKS, indirect=True)
def test_a_hybrid_whose_weights_are_in_parts(servers):
    [found] = [x for x in servers.run(servers.size, check_sharded, timeout=120) if x is not None]
    assert [captured for captured, _, _ in found] == [generated for *_, generated in found]
    assert [plain for _, plain, _ in found] == [generated for *_, generated in found]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_captured_steps_read_16_bits_as_they_are(dtype):
    """Of wide weights all but 2^-14 counts; of a query of 16 bits everything, in fp32."""
    torch.manual_seed(0)
    x, y = torch.rand(6, 5, 1000, device="cuda"), torch.randn(6, 1000, 64, device="cuda").to(dtype)
    for left in (x, x.to(dtype)):
        got, want = product(left, y), left.double() @ y.double()
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 2**-14 * want.norm()


def check_memory(rank: int) -> dict[str, float] | None:
    """A GPU with 2 GiB left: a request of as many tokens as are said to fit is answered, and what it took."""
    cp = ContextParallel(pool.group(), validate="never")
    assert fitting(Hybrid(make(256, 4, ["gdn", "mamba2"], torch.bfloat16)), cp, 8192, 0) is None  # any number
    model = Hybrid(make(1024, 8, ["gdn", "attention"], torch.bfloat16))
    torch.cuda.empty_cache()
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda")
    room = fitting(model, cp, 8192, 0)
    torch.cuda.reset_peak_memory_stats()
    each = Timed(prompt(room - 40), 40)
    start = answer(Engine(model, NoText(), cp, piece=8192, room=room, patience=120), [each])
    taken = torch.cuda.max_memory_reserved() - ballast.nbytes
    del ballast
    torch.cuda.empty_cache()
    if start is None:
        return None
    return {"tokens": len(each.tokens), "room": room, "GiB": taken / GIB, "seconds": each.times[-1] - start}


@pytest.mark.parametrize("servers", RANKS, indirect=True)
def test_memory(servers, alone, record_property):
    (found,) = [x for x in servers.run(servers.size, check_memory, timeout=180) if x is not None]
    record_property("found", found)
    assert found["tokens"] == 40
    assert found["room"] > 40
