"""What chooses a sequence's tokens leaves the host and the device alone with theirs."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ring_la.inference import Sampler
from ring_la.serving.sampling import Chooser
from tests.support.step_graphs import Apart

OPTIONS = [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9}]


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_drawn_as_multinomial_draws_them(options):
    plain, ours = (Sampler(0.8, generator=torch.Generator().manual_seed(3), **options) for _ in range(2))
    chooser = Chooser(ours, {}, logprobs=2)
    for z in 3 * torch.randn(50, 1, 97, generator=torch.Generator().manual_seed(1)):
        want = plain(z)
        with Apart():
            assert (token := chooser(z)).shape == (1,)
        assert token == want


def test_where_nothing_can_be_drawn_there_is_no_token():
    assert Chooser(Sampler(1.0), {1: math.inf})(torch.zeros(1, 5)).tolist() == [-1]


class Launches(TorchDispatchMode):
    """The operators that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_what_is_said_of_a_token_is_on_its_way_with_it():
    """Asked for it later the device, which has the next step to do, does nothing."""
    chooser = Chooser(Sampler(), {}, logprobs=3)
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(1))
    token, own = int(chooser(logits)), logits[0].log_softmax(-1)
    logits.zero_()  # the next step's
    with Launches() as launched:
        said = chooser.said()
    assert launched.names == []
    best = own.topk(3)
    assert (said.logprob, said.top) == (float(own[token]), list(zip(best.indices.tolist(), best.values.tolist())))
