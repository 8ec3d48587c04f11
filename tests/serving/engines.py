"""Engines over small models on CPUs, what they are asked, and the tokens one process finds by reading the whole text
again for every token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ring_la import ContextParallel
from ring_la.inference import generate
from ring_la.models import HybridLM
from ring_la.nn import LAYERS
from ring_la.serving import Completion, Engine, Event, Hybrid, NewToken, NoText, Request
from tests.support.generation import WHOLE, greedy, make, tokens

LONG = 60.0
FIXED = (*WHOLE, "log_linear_mamba2")
"""Layers that no CUDA graph can step."""
SOME = tuple(name for name in LAYERS if name not in ("gdn", "mamba2", "attention"))
"""Layers to leave out: most, as it is seldom their kind that is tested."""


class Asked(Completion):
    """A request, and what it heard."""

    def __init__(self, ids: Sequence[int], max_tokens: int = 4, **options) -> None:
        self.events: list[Event] = []
        super().__init__(Request(list(ids), max_tokens, **options), self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [e.token for e in self.events if isinstance(e, NewToken)]


def prompt(length: int) -> list[int]:
    return tokens(1, length)[0].tolist()


def serve(engine: Engine, jobs: Sequence[Completion]) -> None:
    """Answer all of them, then stop."""
    if engine.ranks.leads:
        for job in jobs:
            engine.submit(job)
        engine.stop()
    engine.run()


def engine(cp: ContextParallel | None = None, without: tuple[str, ...] = SOME, **options) -> Engine:
    return Engine(Hybrid(make(without)), NoText(), cp, patience=LONG, **options)


@cache
def model(without: tuple[str, ...]) -> HybridLM:
    return make(without).eval()


def truth(ids: Sequence[int], n: int, without: tuple[str, ...] = SOME) -> list[int]:
    return list(_truth(tuple(ids), n, without))


@cache
@torch.no_grad()
def _truth(ids: tuple[int, ...], n: int, without: tuple[str, ...]) -> list[int]:
    return greedy(model(without), torch.tensor([ids]), n)[0].tolist()


def truth_of(job: Asked, without: tuple[str, ...] = SOME) -> list[int]:
    """By a cache, of long prompts."""
    return generate(model(without), torch.tensor([job.request.ids]), job.request.max_tokens)[0].tolist()


def broken_at(server: Engine, token: int, after: bool = False) -> None:
    """Reading a prompt that ends with `token` raises an error, `after`: when it has been read."""
    read = server.model.read

    def broken(ids, states, cp):
        bad = int(ids[0, -1]) == token
        out = None if bad and not after else read(ids, states, cp)
        if bad:
            raise RuntimeError("no such prompt")
        return out

    server.model.read = broken


def memory(x: object) -> int:
    """Bytes of the memory behind all tensors in `x`, each once."""
    found, todo, done = {}, [x], set()
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif id(x) not in done and not isinstance(x, (str, int, torch.nn.Module)):
            done.add(id(x))
            todo += (
                x.values()
                if isinstance(x, dict)
                else x
                if isinstance(x, (list, tuple))
                else getattr(x, "__dict__", {}).values()
            )
    return sum(found.values())
