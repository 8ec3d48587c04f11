"""A `HybridLM` of which each rank has a part of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ring_la import ContextParallel, UnsupportedError
from ring_la.inference import generate, sharded_weights
from ring_la.inference.sharded_weights import held_weights
from ring_la.models import HybridConfig, HybridLM
from ring_la.serving import Ended, Engine, Failed, static
from ring_la.serving.load import load
from tests.support.pool import group
from tests.support.step_graphs import Recorded, standing

from .engines import LONG, Asked

LARGE = 512
"""Bytes from which a weight is sharded here."""
ASKED = ((21, 6), (2, 4), (1, 5), (9, 6))
"""Tokens of a prompt, and of its answer: two are split, two are too short for it."""


def make(tied: bool, *more: str) -> HybridLM:
    """Weights whose rows and experts do not divide by the ranks."""
    torch.manual_seed(0)
    mixture = dict(mlp="moe", mlp_options=dict(experts=5, top_k=2, shared_hidden=16, shared_gate=True))
    layers = ["gdn", "attention", *more] if tied else ["gdn", "mamba2"]
    model = HybridLM(HybridConfig(97, 32, layers, 2, mlp_dim=24, tie_embeddings=tied, **(mixture if tied else {})))
    with torch.no_grad():  # logits that are far apart
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.double().eval()


def prompt(n: int) -> list[int]:
    return torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def want(model: HybridLM) -> list[list[int]]:
    return [generate(model, torch.tensor([prompt(n)]), k)[0].tolist() for n, k in ASKED]


def check(rank: int, folder: str, fixed: bool) -> list[list[int]]:
    """Answers side by side, one that fails in the last block among them, and what a rank holds."""
    cp = ContextParallel(group(), scan="ring", validate="never")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_weights, "LEAST", LARGE)
        patch.setattr(static, "goes_ahead", lambda device: True)
        standing(patch.setattr, Recorded)
        return answers(folder, cp, fixed)


def answers(folder: str, cp: ContextParallel, fixed: bool) -> list[list[int]]:
    model, text = load(folder, cp, sharded=True)
    jobs, bad = [Asked(prompt(n), k) for n, k in ASKED], Asked([5, 6, 7, 8, 9, 1], 5)
    engine = Engine(model, text, cp, patience=LONG, piece=13, batch=3, keep=1 << 20, capture=fixed)
    assert engine.states.together
    break_inside(model, bad.request.ids)
    if engine.ranks.leads:
        engine.submit(jobs[0], bad, *jobs[1:])
        engine.stop()
    engine.run()
    if engine.ranks.leads:
        assert bad.events == [Failed("the request has failed (RuntimeError)")]
        assert all(isinstance(job.events[-1], Ended) for job in jobs), [job.events[-1] for job in jobs]
    assert (engine.batch.graphs > 0) == fixed
    held, sizes = held_weights(model.model), [p.nbytes for p in model.model.parameters()]
    assert held < (1 / cp.size + 0.15) * sum(sizes), (held, sum(sizes))
    return [job.tokens for job in jobs]


def break_inside(model, ids: list[int]) -> None:
    """Reading that prompt fails in the last block, with weights gathered and more on their way."""
    read, bad = model.read, []

    def marked(given, states, cp):
        bad[:] = [1] * (given[0].tolist() == ids)
        try:
            return read(given, states, cp)
        finally:
            bad.clear()

    def broken(*_: object) -> None:
        if bad:
            raise RuntimeError("no such prompt")

    model.read = marked
    model.model.blocks[-1].register_forward_pre_hook(broken)


def check_refused(rank: int, folder: str) -> str:
    with pytest.raises(UnsupportedError) as refused:
        load(folder, ContextParallel(group(), scan="ring", deterministic=True), sharded=True)
    return str(refused.value)


def test_tokens_are_those_of_whole_weights(ranks, tmp_path: Path):
    for tied, more, size, fixed in ((True, ("mla", "kda"), 2, False), (True, (), 3, True), (False, (), 2, True)):
        model, folder = make(tied, *more), tmp_path / f"{tied}-{size}"
        folder.mkdir()
        torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, folder / "checkpoint.pt")
        assert ranks.run(size, check, str(folder), fixed)[0] == want(model), (tied, size, fixed)
    assert all("deterministic" in said for said in ranks.run(2, check_refused, str(folder)))


def test_one_rank_has_all(tmp_path: Path):
    model = make(False)
    torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, tmp_path / "checkpoint.pt")
    served, _ = load(tmp_path, sharded=True)
    assert not served.shares_weights
    assert not any(isinstance(p, DTensor) for p in served.model.parameters())
