"""A rank whose host waits for its GPU, which waits for messages of NCCL's that do not come: it is let go, and told why.

pytest -m gpu tests/gpu/test_lookout.py
"""

from __future__ import annotations

import time

import pytest
import torch

import ring_la
from tests.support.pool import group

pytestmark = pytest.mark.gpu(needs=2)
LATE = 6.0
"""Seconds that a rank may be late."""


def check_waiting(rank: int) -> tuple[str, float]:
    """Two calls, compared before; rank 0 makes the second where rank 1 makes the first and waits for its state."""
    cp = ring_la.ContextParallel(group(), scan="ring", transport="torch", timeout=300)
    layout = cp.layout(64 * cp.size, "contiguous")
    x = [torch.randn(1, 64, 2, 16, device=cp.device) for _ in range(3)]
    for scale in (1.0, 2.0):
        ring_la.linear_attention(*x, scale=scale, layout=layout)
    torch.cuda.synchronize()
    began = time.monotonic()
    try:
        if rank == 0:
            time.sleep(1.0)
            ring_la.linear_attention(*x, scale=2.0, layout=layout)
        else:
            ring_la.linear_attention(*x, scale=1.0, layout=layout)
            torch.cuda.synchronize()
            ring_la.linear_attention(*x, scale=1.0, layout=layout)
    except ring_la.RingLAError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing raised", time.monotonic() - began


def check_late(rank: int) -> tuple[str, float]:
    """Rank 0 does not come to a call that rank 1 has made before, and waits for."""
    cp = ring_la.ContextParallel(group(), scan="ring", transport="torch", timeout=LATE)
    layout = cp.layout(64 * cp.size, "contiguous")
    x = [torch.randn(1, 64, 2, 16, device=cp.device) for _ in range(3)]
    ring_la.linear_attention(*x, layout=layout)
    torch.cuda.synchronize()
    began = time.monotonic()
    try:
        if rank == 0:
            time.sleep(3 * LATE)
        ring_la.linear_attention(*x, layout=layout)
        torch.cuda.synchronize()
        ring_la.linear_attention(*x, layout=layout)
    except ring_la.RingLAError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing raised", time.monotonic() - began


def test_a_rank_that_does_not_come_is_named(gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, check_late)
    gpu_ranks.stop()
    record_property("found", found)
    for message, seconds in found[1:]:
        assert message.startswith("PeerError: "), found
        assert "no call of rank 0" in message, found
        assert seconds < 2 * LATE


def test_a_waiting_rank_is_told(gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, check_waiting)
    gpu_ranks.stop()
    record_property("seconds", [seconds for _, seconds in found])
    assert found[0][0].startswith("DisagreementError: the ranks of this group disagree on"), found
    assert [message for message, _ in found] == [found[0][0]] * len(found)
    assert max(seconds for _, seconds in found) < 15
