"""Requests to an engine on GPUs: prompts, the models that read them, and when each token came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ring_la.models import HybridConfig, HybridLM
from ring_la.serving import Completion, Ended, Engine, Event, NewToken, Request

GIB = 2**30


class Timed(Completion):
    """A request, its tokens, when each came, and what the model said of it where that is asked for."""

    def __init__(self, ids: Sequence[int], max_tokens: int, **options: Any) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.times: list[float] = []
        self.end: Event | None = None
        super().__init__(Request(list(ids), max_tokens, **options), self.hear)

    def hear(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self.tokens.append(event.token)
            self.times.append(time.perf_counter())
            if event.said is not None:
                self.logprobs.append(event.said.logprob)
        else:
            self.end = event


def answer(engine: Engine, jobs: Sequence[Completion]) -> float | None:
    """When the requests were made; returns after all are answered. None on ranks that follow the first."""
    if engine.ranks.leads:
        for each in jobs:
            engine.submit(each)
        engine.stop()
    start = time.perf_counter()
    engine.run()
    if not engine.ranks.leads:
        return None
    assert all(isinstance(each.end, Ended) for each in jobs), [each.end for each in jobs]
    return start


def make(dim: int, heads: int, layers: list[str], dtype: torch.dtype) -> HybridLM:
    torch.manual_seed(0)
    options = {"attention": {"num_kv_heads": max(1, heads // 4)}}
    with torch.device("cuda"):
        model = HybridLM(HybridConfig(257, dim, layers, heads, options=options))
        with torch.no_grad():  # logits that are far apart
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
    return model.to(dtype)


def prompt(length: int) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(1)).tolist()
