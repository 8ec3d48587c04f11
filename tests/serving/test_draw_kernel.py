"""The kernel that draws a row's token, interpreted, against the definition and against plain operators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ring_la.serving import Request, sampling
from ring_la.serving.sampling import Choosers, Ways
from tests.serving import drawn
from tests.support.interpreter import interpreted

interpreted()

from ring_la.serving import draw_kernel  # noqa: E402

V = 75
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(temperature=0.8, seed=3),
    dict(temperature=1.3, top_k=9, top_p=0.9, seed=3),
    dict(temperature=1.0, top_p=0.7, seed=2**63 - 1, frequency_penalty=0.9, logit_bias={3: 5.0}),
    dict(temperature=100.0, seed=-8),
]


@pytest.fixture(autouse=True)
def by_the_kernel(monkeypatch):
    """In several parts of a row, the last of them not full."""
    monkeypatch.setattr(sampling, "by_kernel", lambda y: True)
    monkeypatch.setattr(draw_kernel, "TOKENS", 32)


def seated(options: list[dict[str, Any]], tokens: int = V) -> tuple[Choosers, Ways]:
    choosers, ways = Choosers(torch.device("cpu")), Ways(0)
    for row, each in enumerate(options):
        chooser = Request([1], **each).chooser()
        choosers.seat(row, chooser, tokens)
        ways |= chooser.ways
    return choosers, ways


def test_each_row_s_tokens_are_those_of_the_definition():
    choosers, ways = seated(OPTIONS)
    found: list[list[int]] = [[] for _ in OPTIONS]
    for n, logits in enumerate(3 * torch.randn(9, len(OPTIONS), V, generator=torch.Generator().manual_seed(1))):
        parts = ((0, 5),) if n < 5 else ((0, 1), (1, 5))  # rows that lie elsewhere
        lies = logits if n != 2 else logits.T.contiguous().T
        tokens = torch.cat([choosers.choose(lies[a:b], ways, first=a) for a, b in parts])
        for row, options in enumerate(OPTIONS):
            assert int(tokens[row]) == drawn.token(logits[row], found[row], **options), options
            found[row].append(int(tokens[row]))


def test_small_numbers_are_exact():
    """Of many equal tokens the one with the smallest number is drawn."""
    tokens, seeds = 1500, range(12)
    choosers, ways = seated([dict(temperature=1.0, seed=seed) for seed in seeds], tokens)
    got = choosers.choose(torch.zeros(len(seeds), tokens), ways).tolist()
    assert got == [min(range(tokens), key=lambda i: drawn.exponential(seed, 0, i)) for seed in seeds]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_where_nothing_can_be_drawn_there_is_no_token():
    options = [dict(temperature=1.0), dict(temperature=1.0, logit_bias={1: math.inf}), {}]
    choosers, ways = seated([*options, dict(temperature=1.0, logit_bias=dict.fromkeys(range(V), -math.inf))])
    assert choosers.choose(torch.zeros(4, V), ways)[1:].tolist() == [-1, 0, -1]
    assert choosers.choose(torch.full((4, V), math.nan), ways).tolist() == [-1] * 4
