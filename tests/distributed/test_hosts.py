"""Ranks that pretend to be on several hosts: calls that differ later are the same error on all of them, as on one."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch

import ring_la
from ring_la import comm
from ring_la.comm import Group, carrier
from ring_la.comm.board import ELSEWHERE, NEVER
from tests.support.caught import caught
from tests.support.pool import group

PATIENCE = 60.0


def spread(rank: int, hosts: str) -> ring_la.ContextParallel:
    """Ranks on hosts, a letter each: their memory is not shared between hosts."""
    with mock.patch.object(socket, "gethostname", return_value=f"host-{hosts[rank]}"):
        cp = ring_la.ContextParallel(group(), scan="ring", attention="ring", timeout=PATIENCE)
    assert not cp.comm.one_host
    assert cp.comm.agreement.calls is not None
    return cp


def check_calls(rank: int, hosts: str) -> list[tuple[str, float]]:
    """One cp after another, so that a test is one run: each entry what this rank gets where the last one differs."""
    cp, odd = spread(rank, hosts), rank == len(hosts) - 1
    layout = cp.layout(24, "contiguous")
    x = [torch.ones(1, layout.local_length, 2, 4, requires_grad=True) for _ in range(3)]
    call = lambda scale: ring_la.linear_attention(*x, scale=scale, layout=layout).o.sum()  # noqa: E731
    for scale in (1.0, 2.0):
        call(scale).backward()
    first, second = call(1.0), call(2.0)
    said = [caught((second if odd else first).backward)]  # in another order
    said += [caught(lambda: call(2.0 if odd else 1.0))]  # another call, made before
    said += [caught(lambda: call(1.0) if odd else layout.gather(x[0][:, :, :, :3] if rank else x[0]))]  # new, and known
    narrow = lambda: ring_la.linear_attention(x[0], x[1][..., :3] if odd else x[1], x[2], scale=1.0, layout=layout)  # noqa: E731
    said += [caught(narrow)]  # refused on one rank
    return [*said, caught(lambda: call(1.0))]


@pytest.mark.parametrize("hosts", ["ab", "abb", "abac"])
def test_later_calls_of_ranks_on_several_hosts_are_compared(ranks, hosts):
    results = ranks.run(len(hosts), check_calls, hosts)
    for which, about in enumerate(["the backward pass", "the arguments of linear_attention", "", ""]):
        messages = [r[which][0] for r in results]
        assert messages[0].startswith(f"DisagreementError: the ranks of this group disagree on {about}"), messages
        assert messages == [messages[0]] * len(hosts), messages
    assert "rank 0: nothing refused" in results[0][3][0]
    assert [r[4][0] for r in results] == ["nothing raised"] * len(hosts)  # nothing had been sent
    assert max(seconds for r in results for _, seconds in r) < 10


def check_many(rank: int) -> tuple[int, int]:
    """Far more calls than the log has lines, in silence; and the threads that are left once the group is gone."""
    of_hosts = lambda: sum(t.name == "ring_la hosts" for t in threading.enumerate())  # noqa: E731
    gc.collect()
    before = of_hosts()
    with mock.patch.object(socket, "gethostname", return_value=f"host-{rank % 2}"):
        own = Group(group(), timedelta(seconds=PATIENCE))
    assert of_hosts() - before == (rank < 2)
    calls, entries = own.agreement.calls, [comm.Entry.of("this", str(n)) for n in range(3)]
    for n in range(3000):
        own.agreement.again(entries[n % 3])
        if n % 500 == rank:
            calls.meet()
    calls.meet()
    count = calls._count
    del own, calls
    gc.collect()
    return count, of_hosts() - before


def test_the_log_of_several_hosts_goes_round_and_its_threads_end(ranks):
    results = ranks.run(3, check_many)
    assert [count for count, _ in results] == [3000] * 3
    assert [left for _, left in results] == [0] * 3


def check_look(rank: int) -> str:
    """As on GPUs: rank 0's host waits for its device, and its thread looks at the log (`lookout`)."""
    agreement = spread(rank, "ab").comm.agreement
    one, other = (agreement.agree("this", {"scale": n}) for n in (1, 2))
    if rank:
        return caught(lambda: (agreement.again(other), agreement.calls.meet()))[0]
    agreement.again(one)
    deadline = time.monotonic() + PATIENCE
    while (why := agreement.calls.hopeless()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"DisagreementError: {why()}"


def test_who_looks_at_the_log_sees_other_hosts(ranks):
    said = ranks.run(2, check_look)
    assert (
        said
        == ["DisagreementError: the ranks of this group disagree on this:\n  rank 0: scale=1\n  rank 1: scale=2"] * 2
    )


def waiting(call: Callable[[], object]) -> str:
    """What a wait for other ranks ends with."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def check_death(rank: int, hosts: str, lives: float) -> tuple[str, float]:
    """Rank 2 ends while the others wait: its host's first rank or another. `lives`: seconds between two looks at it."""
    with mock.patch.object(carrier, "LIVES", lives):
        agreement, start = spread(rank, hosts).comm.agreement, time.monotonic()
        agreement.agree("this", 1)
        if rank == 2:
            os._exit(1)
        agreement.again(comm.Entry.of("this", "1"))
        said = waiting(agreement.calls.meet)
        del agreement  # leaves
        gc.collect()
    return said, time.monotonic() - start


@pytest.mark.parametrize("lives", [carrier.LIVES, 1e9])  # the last: the host's first rank leaves before it looks
@pytest.mark.parametrize("hosts", ["aab", "abb"])
def test_a_rank_that_dies_on_another_host_is_named(ranks, hosts, lives):
    for message, seconds in ranks.run(3, check_death, hosts, lives, dying=(2,)):
        assert message == "rank 2 (global rank 2) died"
        assert seconds < 20


def check_last_word(rank: int) -> str:
    """Rank 1's host says that rank 1 has ended and leaves, just after rank 0 has looked who ended."""
    agreement = spread(rank, "ab").comm.agreement
    agreement.agree("this", 1)
    if rank:
        return waiting(agreement.calls.meet)
    calls, gone = agreement.calls, agreement.calls._gone

    def before_it_comes(n: int) -> list[int]:
        said = gone(n)
        calls._board.lose(1, n - 1)
        calls._board.words[ELSEWHERE] = NEVER
        return said

    with mock.patch.object(calls, "_gone", before_it_comes):
        return waiting(lambda: agreement.again(comm.Entry.of("this", "1")) or calls.meet())


def test_who_ended_is_known_before_its_host_leaves(ranks):
    assert ranks.run(2, check_last_word) == ["rank 1 (global rank 1) died", "nothing raised"]
