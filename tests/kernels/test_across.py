"""Which split calls go by the kernels of one GPU (`wy/one_launch`), and what of them."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import interpreted

interpreted()

from ring_la.algebra import Rule  # noqa: E402
from ring_la.kernels.protocol import Inputs, OutputUse  # noqa: E402
from ring_la.kernels.wy import gdn_launches, one_launch  # noqa: E402

SPLIT = OutputUse(saved=True)


def call(tokens: int) -> Inputs:
    x = torch.empty(1, tokens, 2, 128, device="meta")
    return Inputs(x, x, x, x[..., 0], x[..., 0])


RULES = [(Rule("delta", "scalar"), 2**16), (Rule("delta", "none"), None), (Rule("erase", "scalar"), None)]


@pytest.mark.parametrize(("rule", "least"), RULES)
def test_split_calls_that_train_go_so_from_a_size_on(rule, least):
    for tokens in (2**16 - 1, 2**16):
        found = one_launch.choice(rule, call(tokens), SPLIT)
        assert (found is one_launch.DELTA) == (least is not None and tokens >= least)


def test_a_call_that_kda_takes(monkeypatch):
    kda, x = Rule("delta", "diagonal", lower_bound=-5.0), call(64)
    assert not one_launch.ACROSS.takes(kda, x)
    monkeypatch.setattr(one_launch, "ACROSS", one_launch.Least(delta_diagonal=128))
    assert one_launch.ACROSS.takes(kda, x)


@pytest.mark.parametrize(("tokens", "heads", "length"), [(4096, 32, 1024), (8192, 32, 2048), (32768, 32, 4096)])
def test_spans_are_as_long_as_an_h200_likes_them(tokens, heads, length):
    """Of the lengths that were measured the fastest."""
    assert gdn_launches.across(tokens, heads, 1, 132, True) == (length, length)
