"""A peer that does not send what others wait for: NaN within the timeout, then a PeerError that names it.

pytest -m gpu tests/gpu/test_late_peers.py
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ring_la
from ring_la.algebra import Affine
from ring_la.comm import Group
from ring_la.scan import STRATEGIES, Chain, Link
from tests.support import pool

pytestmark = pytest.mark.gpu(needs=2)


def check_late(rank: int) -> tuple[float, str] | None:
    """The last rank does not send what the first waits for; there, the seconds until NaN came, and the next error."""
    g = Group(pool.group(), timedelta(seconds=3), "symmetric")
    x = torch.ones(1024, device=g.device)
    g.all_gather(x).wait()
    together()
    if rank:
        return None
    began = time.monotonic()
    got = g.recv(x.shape, x.dtype, x.device, g.size - 1).wait()
    return named(began, got, lambda: g.all_gather(x))


def check_late_link(rank: int) -> tuple[float, str] | None:
    """The first rank does not send its state; the second says when NaN came, and the next error."""
    own = torch.cuda.device_count() >= dist.get_world_size()  # else mailboxes are there where they are asked for alone
    g = Group(pool.group(), timedelta(seconds=3), "auto" if own else "symmetric")
    assert g.mailboxes is not None
    link = Link(Affine("scalar", torch.ones(1, 32, device=g.device), torch.ones(1, 32, 128, 128, device=g.device)))
    like, chain = Affine("scalar", None, link.map.b), Chain.line(g.size)
    ring = functools.partial(STRATEGIES["ring"].start, chain, [link], like, g)
    ring().wait()
    together()
    if rank != 1:
        return None
    began = time.monotonic()
    (entering,) = ring().wait()
    return named(began, entering, lambda: ring().wait())


def together() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def named(began: float, got: torch.Tensor, again: Callable[[], object]) -> tuple[float, str]:
    """Seconds until `got` was there, all NaN; and what `again` raises."""
    torch.cuda.synchronize()
    assert bool(got.isnan().all()), got
    seconds = round(time.monotonic() - began, 2)
    with pytest.raises(ring_la.PeerError) as error:
        again()
    return seconds, str(error.value)


@pytest.mark.parametrize(("check", "waiting", "missing"), [(check_late_link, 1, 0), (check_late, 0, -1)])
def test_late(check, waiting, missing, gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, check)
    gpu_ranks.stop()  # an exchange is half done
    seconds, error = found[waiting]
    record_property("seconds until NaN", seconds)
    assert f"rank {missing % gpu_ranks.size}" in error
