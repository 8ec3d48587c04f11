"""The host's time of a call on a split sequence beside that of a whole one: `pytest -m gpu tests/gpu/test_host_times.py
--gpu-ranks 2`. What a host takes does not depend on whether its ranks share a GPU, as long as nothing waits for it.
"""

from __future__ import annotations

import pytest
import torch

import ring_la
from benchmarks.host import drawn, microseconds
from tests.support import pool

pytestmark = pytest.mark.gpu(needs=2)
SHAPE = dict(B=1, T=2048, Hk=16, H=16, K=128, V=128)
MOST = 2.0
"""A split call by mailboxes takes at most so many times a whole one; 1.3 is aimed at, on a host with nothing else."""


def check(rank: int, name: str) -> dict[str, float]:
    """µs of a forward without and with gradients, whole and split."""
    cp = ring_la.ContextParallel(pool.group(), scan="ring", transport="symmetric", timeout=60)
    layouts = {"whole": None, "split": cp.layout(SHAPE["T"] * cp.size, "contiguous")}
    x = drawn("linear_attention" if name == "attention" else name, SHAPE)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    found = {}
    for way, layout in layouts.items():
        for grads, given in (("", x), (", gradients", leaves)):

            def call() -> torch.Tensor:
                return getattr(ring_la, name)(**given, layout=layout).o  # noqa: B023

            for _ in range(4):
                call()
            found[way + grads] = microseconds(call)
    return found


@pytest.mark.parametrize("name", ["gated_delta_rule", "simple_gla", "attention"])
def test_a_split_call_takes_the_host_little_more(name, gpu_ranks, record_property):
    for rank, found in enumerate(gpu_ranks.run(gpu_ranks.size, check, name)):
        record_property(f"us_{rank}", str(found))
        if name != "attention":
            assert found["split"] < MOST * found["whole"], found
