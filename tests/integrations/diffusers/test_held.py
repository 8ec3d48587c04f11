"""What blocks are given goes when they are done: a step holds the tokens of one block, however many there are."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("diffusers")

import torch

import ring_la
from ring_la.integrations.diffusers import parallelize
from tests.support.pool import group

from .linear_models import sana


def most_held(rank: int, P: int) -> int:
    """Inputs of blocks that are there at once."""
    torch.manual_seed(0)
    model, inputs = sana(layers=6)
    parallelize(model.double(), ring_la.ContextParallel(group(P), scan="ring", attention="ring", timeout=60))
    given: list[weakref.ref] = []
    counts = []

    def note(block, args):
        given.append(weakref.ref(args[0]))
        counts.append(sum(x() is not None for x in given))

    for block in model.transformer_blocks:
        block.register_forward_pre_hook(note)
    with torch.no_grad():
        model(**inputs)
    return max(counts)


@pytest.mark.parametrize("P", [1, 2])
def test_blocks_inputs_are_not_kept(ranks, P):
    assert max(ranks.run(P, most_held, P)) <= 2
