"""What a block of SANA's reads and writes, counted on meta tensors of true shape: no more than Diffusers' own, but for
what our attention does in fp32 where SANA-Video's library does it in bf16."""

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
        parts = [*a_block(SHAPES[name], None), *a_block(SHAPES[name], cp)]
        found.append(tuple(sum(x.values()) for x in parts))
    return found


def test_blocks_of_sana_move_no_more_bytes(ranks):
    for (theirs, _, ours, turned), most in zip(ranks.run(1, count_blocks)[0], (1.0, 1.03)):
        assert turned == 0
        assert 0.9 * theirs < ours < most * theirs
