"""Ranks that come to different calls, each compared before: the same error on all of them, in seconds and not at the
timeout, whoever comes first."""

from __future__ import annotations

import threading
import time
import types
from unittest import mock

import pytest
import torch

import ring_la
from ring_la import comm
from ring_la.comm import calls, lookout
from ring_la.comm.lookout import look_out
from ring_la.integrations.ring_flash_attn import ring_flash_attn_func
from tests.support.caught import caught
from tests.support.pool import group
from tests.support.recurrence_cases import make_inputs

PATIENCE = 60.0


def two_calls(scan: str):
    """Two calls on layouts of their own, made and compared before."""
    cp = ring_la.ContextParallel(group(), scan=scan, timeout=PATIENCE)
    calls = []
    for T, name, more in ((40, "gla", {}), (64, "delta_rule", {"scale": 2.0})):
        layout = cp.layout(T, "contiguous")
        x = {n: layout.shard(t.detach()) for n, t in make_inputs(name, 1, T).items()}
        calls.append(lambda x=x, n=name, m=more, at=layout: getattr(ring_la, n)(**x, **m, layout=at))
    for call in (*calls, *calls):
        call()
    return calls


def check_order(rank: int, scan: str, odd: int, late: int) -> list[tuple[str, float]]:
    """Rank `odd` makes the second call where the others make the first; rank `late` comes to it after the others."""
    first, second = two_calls(scan)
    time.sleep(0.5 if rank == late else 0.0)
    again = [caught(second if rank == odd else first), caught(first)]
    return [*again, caught(lambda: ring_la.ContextParallel(group()))]


@pytest.mark.parametrize(("scan", "odd", "late"), [("ring", 0, 2), ("all_gather", 2, 0)])
def test_calls_that_differ_are_the_same_error_everywhere_and_soon(ranks, scan, odd, late):
    results = ranks.run(3, check_order, scan, odd, late)
    messages = [r[0][0] for r in results]
    assert messages[0].startswith("DisagreementError: the ranks of this group disagree on which call this is"), messages
    assert messages == [messages[0]] * 3
    assert f"rank {odd}: call=delta_rule" in messages[0]
    assert "scale=2.0" in messages[0]
    assert f"rank {(odd + 1) % 3}: call=gla" in messages[0]
    assert all(seconds < 10 for r in results for _, seconds in r)
    assert all("no more use" in message for r in results for message, _ in r[1:])


def check_option(rank: int, name: str) -> tuple[str, float]:
    """Equal shapes, another scale, both seen before: nothing waits for anything, so the result would be wrong."""
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=PATIENCE)
    layout = cp.layout(40, "contiguous")
    x = {n: layout.shard(t.detach()) for n, t in make_inputs("gla", 1, 40).items()}
    if name == "attention":
        x = {"q": x["q"], "k": x["k"], "v": x["k"]}
    call = getattr(ring_la, name)
    for scale in (1.0, 2.0):
        call(**x, scale=scale, layout=layout)
    return caught(lambda: call(**x, scale=1.0 + rank, layout=layout))


@pytest.mark.parametrize("name", ["gla", "attention"])
def test_an_option_that_differs_later_is_an_error(ranks, name):
    results = ranks.run(2, check_option, name)
    ranks.stop()
    assert results[0][0].endswith(f"the arguments of {name}:\n  rank 0: scale=1.0\n  rank 1: scale=2.0")
    assert results[1][0] == results[0][0]


def check_new_call(rank: int) -> tuple[str, float]:
    """A call that is new on one rank, where the other makes one that was compared before."""
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=PATIENCE)
    layout = cp.layout(24)
    x = torch.ones(1, layout.local_length, 4)
    layout.gather(x)
    return caught(lambda: layout.gather(x if rank else x.double()))


def test_a_new_call_beside_a_known_one_is_an_error(ranks):
    results = ranks.run(2, check_new_call)
    ranks.stop()
    assert results[0][0].startswith("DisagreementError")
    assert "dtype torch.float64" in results[0][0]
    assert results[1][0] == results[0][0]
    assert max(seconds for _, seconds in results) < 10


def check_replays(rank: int) -> tuple[str, float]:
    """A step that ring_la.capture may replay, where the ranks' steps are of different kinds, both known."""
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=PATIENCE)
    step = ring_la.capture(lambda x: x + 1, cp=cp)
    for n in (3, 4, 3, 3 + rank):
        try:
            step(torch.zeros(n))
        except ring_la.DisagreementError as error:
            return f"DisagreementError: {error}", 0.0
    return caught(lambda: cp.layout(30))


def test_steps_of_other_kinds_are_an_error(ranks):
    results = ranks.run(2, check_replays)
    assert results[0][0].startswith("DisagreementError: the ranks of this group disagree on the captured step"), results
    assert results[1][0] == results[0][0]


def check_lookout(rank: int, how: str) -> list[tuple[str, float]]:
    """As on GPUs: rank 0's host waits for its device, which waits for a message that rank 1 does not send."""
    cp = ring_la.ContextParallel(group(), scan="ring", timeout=2.0 if how == "late" else PATIENCE)
    agreement, ended = cp.comm.agreement, threading.Event()
    one, other = (agreement.agree("this", {"scale": n}) for n in (1, 2))
    look_out(agreement.calls, ended.set, lambda: how in ("late", "ahead"))
    if rank:
        if how == "ahead":  # its host was in further calls when it died
            agreement.again(one)
            agreement.again(one)
        time.sleep(0.5)
        return [caught(lambda: agreement.again(other))] if how == "differs" else []
    agreement.again(one)
    with mock.patch.object(lookout, "AHEAD", 1.0):
        agreement.calls._is_dead = lambda r: how in ("died", "ahead")
        assert ended.wait(10)  # a device that waits
    return [caught(lambda: agreement.again(one)), caught(lambda: cp.comm.recv((1,), torch.float32, cp.device, 1))]


@pytest.mark.parametrize("how", ["differs", "died", "ahead", "late"])
def test_a_host_that_waits_for_its_device_is_let_go(ranks, how):
    (again, message), other = ranks.run(2, check_lookout, how)  # nothing was sent
    assert again[0] == message[0]
    if how != "differs":
        who = "no call of rank 1 (global rank 1) in 2 s" if how == "late" else "rank 1 (global rank 1) died"
        assert again[0].startswith(f"PeerError: rank 0 of 2 waits for messages that do not come: {who}")
    else:
        assert (
            again[0]
            == other[0][0]
            == ("DisagreementError: the ranks of this group disagree on this:\n  rank 0: scale=1\n  rank 1: scale=2")
        )


def check_abort(rank: int) -> float:
    """As on GPUs, where NCCL's abort waits for the graphs that hold its messages."""
    cp, freed = ring_la.ContextParallel(group(), scan="ring", timeout=PATIENCE), threading.Event()
    cp.comm.group = types.SimpleNamespace(abort=freed.wait, group_name=cp.comm.group.group_name)
    cp.comm.on_cuda = True
    start = time.monotonic()
    cp.comm.give_up(ring_la.PeerError("gone"))
    freed.set()
    return time.monotonic() - start


def test_a_host_goes_on_while_messages_are_aborted(ranks):
    seconds = ranks.run(2, check_abort, timeout=20)
    ranks.stop()
    assert max(seconds) < 5


def check_many(rank: int) -> int:
    """Far more calls than the log has lines; the ranks ahead of each other by turns."""
    cp = ring_la.ContextParallel(group(), scan="ring")
    entries = [comm.Entry.of("this", str(n)) for n in range(3)]
    for n in range(3000):
        cp.comm.agreement.again(entries[n % 3])
        if n % 500 == rank:
            cp.comm.agreement.calls.meet()
    cp.comm.agreement.calls.meet()
    return cp.comm.agreement.calls._count


def test_the_log_goes_round(ranks):
    assert len(set(ranks.run(3, check_many))) == 1


def check_backward(rank: int, name: str, how: str) -> list[tuple[str, float]]:
    """Rank 1 goes back through another of two equal calls on layouts of their own, or through none."""
    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring", timeout=PATIENCE)
    calls, (name, _, silent) = [], name.partition(" ")
    for T in (40, 48):
        layout = cp.layout(T, "contiguous", cu_seqlens=(0, T // 2, T) if silent else None)
        x = {n: layout.shard(t.detach()).requires_grad_() for n, t in make_inputs("gla", 1, T).items()}
        if name == "ring_flash_attn":
            q, k = (x[n].to(torch.bfloat16) for n in "qk")
            calls.append(lambda q=q, k=k: ring_flash_attn_func(q, k, k, group=group()).float().square().sum())
            continue
        if name == "attention":
            x = {"q": x["q"], "k": x["k"], "v": x["k"]}
        elif name == "token_shift":
            x = {"x": x["q"]}
        calls.append(lambda x=x, at=layout: getattr(ring_la, name)(**x, layout=at).o.square().sum())
    for call in calls:
        call().backward()
    first, second = calls[0](), calls[1]()
    if how == "skips" and rank == 1:
        return [caught(calls[0])]
    back = caught((second if how == "other" and rank == 1 else first).backward)
    return [back, caught(lambda: cp.layout(30))]  # new, so that it waits for all


SILENT = [(f"{name} silent", "other") for name in ("gla", "token_shift")]
"""Documents end where ranks do: nothing is sent, and the ranks compare themselves all the same."""


@pytest.mark.parametrize(
    ("name", "how"), [("gla", "other"), ("attention", "other"), ("ring_flash_attn", "other"), ("gla", "skips"), *SILENT]
)
def test_backward_passes_that_differ_are_the_same_error(ranks, name, how):
    results = ranks.run(2, check_backward, name, how)
    messages = [next((m for m, _ in r if m != "nothing raised"), "") for r in results]
    assert messages[0].startswith("DisagreementError: the ranks of this group disagree on"), messages
    assert messages[1] == messages[0]
    assert "rank 0: backward of call" in messages[0]
    assert ("rank 1: backward of call" in messages[0]) == (how == "other")
    assert all(seconds < 10 for r in results for _, seconds in r)


def check_late(rank: int) -> tuple[str, float]:
    """Rank 1 comes to another call while rank 0, which waits for it, has compared what was there before."""
    layout = ring_la.ContextParallel(group(), scan="ring", timeout=PATIENCE).layout(40)
    x = {n: layout.shard(t.detach()) for n, t in make_inputs("gla", 1, 40).items()}
    log, compare, looks = layout.cp.comm.agreement.calls, calls.CallLog._compare, []

    def slowly(self, sent=False):
        compare(self, sent)
        looks.append(sent)
        while len(looks) == 2 and log._all[log._first[1]] < log._count:
            time.sleep(0.01)

    if rank == 1:
        time.sleep(0.3)
        return caught(lambda: ring_la.gla(**x | {"g": None}, layout=layout))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.CallLog, "_compare", slowly)
        return caught(lambda: ring_la.gla(**x, layout=layout))


def test_who_comes_while_a_rank_looks_is_compared(ranks):
    results = ranks.run(2, check_late, timeout=30)
    assert all(message.startswith("DisagreementError") and "g: expected" in message for message, _ in results), results
    assert all(seconds < 15 for _, seconds in results)
