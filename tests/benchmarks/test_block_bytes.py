"""What a block of SANA's reads and writes and what a step holds, counted on meta tensors of true shape: less than
Diffusers' own, and no more."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers")

import torch

import ring_la
from benchmarks.diffusion.block_bytes import a_block
from benchmarks.diffusion.shapes import SHAPES
from tests.support.pool import group


def count_blocks(rank: int) -> list[tuple[int, ...]]:
    cp, found = ring_la.ContextParallel(group(1), scan="ring", attention="ring", timeout=60), []
    cp.comm.device = torch.device("meta")
    for name in ("sana", "sana_video"):
        (theirs, _, held), (moved, turned, at_once) = (a_block(SHAPES[name], given) for given in (None, cp))
        found.append((sum(theirs.values()), sum(moved.values()), sum(turned.values()), held, at_once))
    return found


def test_blocks_of_sana_move_fewer_bytes_and_hold_no_more(ranks):
    for theirs, ours, turned, held, at_once in ranks.run(1, count_blocks)[0]:
        assert turned == 0
        assert 0.6 * theirs < ours < 0.8 * theirs
        assert at_once <= 1.01 * held
