"""All blocks of a rank at once, as on GPUs, kernels interpreted: the first row of models of docs/users/promises.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.blockwise import at_once
from tests.support.pool import Ranks
from tests.support.same_bits import LAYERS

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_same_bits.py has it on a GPU"),
]


@pytest.fixture(scope="module")
def scalar() -> Iterator[Ranks]:
    """Ranks of this file alone, which are changed to compute as on a GPU."""
    ranks = Ranks(environment=at_once.SCALAR)
    yield ranks
    ranks.stop()


def test_a_step_at_once_does_not_depend_on_ranks_or_packing(scalar):
    """Losses, gradients and logits, also of ranks without tokens."""
    count, differing = at_once.steps(scalar, LAYERS)
    assert count > 3 * len(LAYERS)
    assert not differing


@pytest.mark.parametrize("name", ["kda", "rwkv7", "gla", "fox"])
def test_prefill_and_decoding_at_once_are_the_forward_pass(scalar, name):
    """A decoder has no token behind the one it reads, a forward pass all of its block."""
    assert at_once.decoding(scalar, [name]) == {}
