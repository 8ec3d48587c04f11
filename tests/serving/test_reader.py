"""The reader of prompts for vLLM, by the HTTP it is asked by."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ring_la.errors import ArgumentError
from ring_la.integrations.vllm.asking import Lease, ReaderError, connection
from ring_la.integrations.vllm.hosts import Remote
from ring_la.integrations.vllm.pages import HandedOver, SequenceBlocks
from ring_la.integrations.vllm.states import WorkerPart
from ring_la.serving.reader import Desk, Door, Unread, listen
from ring_la.serving.reader import door as door_module
from tests.support.reader_health import health

IDS = torch.arange(21) % 13


def refuse(ids: torch.Tensor) -> None:
    if len(ids) < 4:
        raise ArgumentError("prompt", "4 tokens", len(ids))


@pytest.fixture
def door(tmp_path):
    """A desk, and where it is asked."""
    desk, address = Desk(waiting=2), f"unix:{tmp_path}/socket"
    with Door(listen(address), desk, refuse, lambda: {"ranks": 1}):
        yield desk, address


def asking(address: str, name: str, ids: torch.Tensor = IDS, takers: int = 1):
    """A thread that asks, and what it got."""
    lease, got = Lease(address, 20.0), []

    def ask() -> None:
        try:
            got.append(lease.parcels(name, ids, takers))
        except ReaderError as error:
            got.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    return lease, thread, got


def test_two_workers_have_one_prompt_until_both_are_gone(door):
    desk, address = door
    assert health(address) == {"ranks": 1}
    workers = [asking(address, "a", takers=2)]
    asked = desk.next(7, 10.0)
    assert torch.equal(asked.ids, IDS)
    desk.finish(asked, [{"rank": 0}])
    workers[0][1].join(10)
    workers[0][0].close()
    workers.append(asking(address, "a", takers=2))  # which comes late
    workers[1][1].join(10)
    assert [got for *_, got in workers] == [[[{"rank": 0}]]] * 2
    assert desk.forget() == []
    workers[1][0].close()
    assert until(desk.forget) == [7]


def until(told):
    """What it says as soon as that is something, within some seconds."""
    limit = time.monotonic() + 10
    while not (said := told()) and time.monotonic() < limit:
        time.sleep(0.02)
    return said


def test_a_prompt_that_nobody_waits_for_is_not_read(door):
    desk, address = door
    lease, thread, got = asking(address, "a")
    until(lambda: desk.waiting)
    lease.close()
    thread.join(10)
    assert "was given up" in got[0]
    until(lambda: all(not asked.here for asked in desk._asked.values()))
    assert desk.next(1, 0.1) is None
    assert desk.forget() == []
    assert not desk._asked


def test_refusals_say_why(door):
    desk, address = door
    for ids, said in ((IDS[:2], "prompt: expected 4 tokens, got 2"), (IDS[:0], "int64 tokens, 1 to")):
        with pytest.raises(ReaderError, match=said):
            Lease(address, 5.0).parcels("short", ids)
    waiting = [asking(address, name) for name in "ab"]
    until(lambda: desk.waiting == 2)
    with pytest.raises(ReaderError, match="the tokens it was asked with before, or another name, got a"):
        Lease(address, 5.0).parcels("a", IDS + 1)
    with pytest.raises(ReaderError, match="2 prompts wait already"):
        Lease(address, 5.0).parcels("c", IDS)
    desk.finish(desk.next(1, 1.0), error="no room")
    desk.close("the reader has stopped")
    for _, thread, _ in waiting:
        thread.join(10)
    said = [got[0] for _, _, got in waiting]  # whichever came first was refused its room
    assert sorted(("no room" in one, "the reader has stopped" in one) for one in said) == [(False, True), (True, False)]
    with pytest.raises(Unread, match="has stopped"):
        desk.ask("d", IDS, 1)
    with pytest.raises(ReaderError, match="did not answer"):
        health(f"{address}.not")
    with pytest.raises(ArgumentError, match=r"reader: expected unix:PATH or HOST:PORT, got 'x'"):
        connection("x", 1.0)


def said(address: str, request: bytes) -> bytes:
    """All that is answered until the connection is closed, or for a second."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address.removeprefix("unix:"))
        line.settimeout(1.0)
        line.sendall(request)
        return b"".join(iter(lambda: line.recv(4096), b""))


def test_broken_requests_are_answered_and_leave_nothing_behind(door):
    """What is not read of a request is not taken for the next one."""
    desk, address = door
    body, health_too = IDS.numpy().tobytes(), b"GET /health HTTP/1.1\r\n\r\n"
    for where, length, error in (
        (
            "/read?prompt=a",
            "abc",
            b"prompt: expected int64 tokens, 1 to 16777216, with a Content-Length, got abc bytes",
        ),
        ("/read?prompt=a", "9" * 5000, b"prompt: expected int64 tokens"),
        ("/nope", str(len(body)), b"no /nope"),
    ):
        request = f"POST {where} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode() + body + health_too
        assert error in said(address, request)
        assert said(address, request).count(b"HTTP/1.1 ") == 1
    for takers in ("x", "0", "9" * 5000):
        request = (
            f"POST /read?prompt=a&takers={takers} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        assert b"prompt, takers: expected a name and a number" in said(address, request.encode() + body)
    assert not desk._asked


def test_more_clients_wait_than_select_takes(door, monkeypatch):
    """The 1,025th file of a process ended its request with a traceback."""
    desk, address = door
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 1100:
        pytest.skip("no so many files")
    monkeypatch.setattr(door_module, "PEEK", 0.02)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1100, most))
    try:
        with ExitStack() as many:
            for _ in range(1020):
                many.enter_context(open(os.devnull))
            _, thread, got = asking(address, "a")
            asked = desk.next(1, 10.0)
            time.sleep(0.1)
            desk.finish(asked, [{"rank": 0}])
            thread.join(10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert got == [[{"rank": 0}]]


def test_who_is_gone_takes_no_place_among_those_who_wait():
    desk = Desk(waiting=2)
    for name in "ab":
        desk.leave(desk.ask(name, IDS, 1))
    assert desk.ask("c", IDS, 1).here == 1
    assert desk.next(1, 0.0) is desk._asked["c"]


def test_what_is_no_reader_is_told(tmp_path):
    """Another server at the address: a list, or no parcels."""
    for answer in (b"[1]", b'{"x": 1}'):
        path = tmp_path / f"socket{len(answer)}"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()

            def serve(listening: socket.socket = listening, answer: bytes = answer) -> None:
                line, _ = listening.accept()
                with line.makefile("rb") as request:
                    assert all(iter(request.readline, b"\r\n"))
                    request.read(IDS.nbytes)
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
                line.close()

            threading.Thread(target=serve, daemon=True).start()
            with pytest.raises(ReaderError, match="is no reader"):
                Lease(f"unix:{path}", 5.0).parcels("a", IDS)


def read_and_compare(rank: int, folder: str, name: str, hosts: bool) -> dict:
    """On each rank a reader, of Kimi-Linear with a part of the weights; on rank 0 who asks it, and what one process has
    of that prompt."""
    import copy

    import ring_la
    from ring_la.inference import sharded_weights
    from ring_la.integrations.transformers.sharded import shard_weights
    from ring_la.serving.reader import Reader
    from tests.support.pool import group
    from tests.support.transformers_models import RECURRENT

    model = RECURRENT[name].make().eval()
    whole = copy.deepcopy(model)
    cp = ring_la.ContextParallel(group())
    if name == "kimi_linear":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_weights, "LEAST", 512)
            shard_weights(model, cp).settle(model)
        held, all_weights = (sharded_weights.held_weights(x) for x in (model, whole))
        assert held < 0.7 * all_weights
    reader = Reader(model, cp, Path(folder), hosts)
    if rank:
        return reader.run()
    errors: list = []

    def ask() -> None:
        try:
            compare(reader, whole, f"unix:{folder}/socket")
        except BaseException as error:  # shown by the test
            errors.append(repr(error))
        finally:
            reader.stop()

    with Door(listen(f"unix:{folder}/socket"), reader.desk, reader.check, reader.about):
        thread = threading.Thread(target=ask)
        thread.start()
        reader.run()
        thread.join()
    until(lambda: not list(Path(folder).glob("ring-la-reader-*")))  # the other ranks let go of theirs by themselves
    return {"errors": errors, "left": [path.name for path in Path(folder).glob("ring-la-reader-*")]}


def compare(reader, whole, address: str) -> None:
    """What is handed over is the cache of one process, each rank's tokens where they belong."""
    with pytest.raises(ReaderError, match="prompt: expected token ids from 0 to 63, got 0 to 64"):
        Lease(address, 20.0).parcels("wrong", torch.arange(65))
    with torch.no_grad():
        cache = whole(input_ids=IDS[None], use_cache=True).past_key_values
    lease = Lease(address, 20.0)
    parcels = lease.parcels("a", IDS)
    over = HandedOver(parcels, torch.device("cpu"), Remote(20.0).read)
    assert [parcel["rank"] for parcel in parcels] == list(range(reader.cp.size))
    for at, want in enumerate((cache.layers[1].keys[0], cache.layers[1].values[0])):
        found = torch.full_like(want.transpose(0, 1), torch.nan)
        for tokens, *pair in over.keys[1]:
            assert len(tokens) < len(IDS)
            found[tokens] = pair[at]
        torch.testing.assert_close(found, want.transpose(0, 1), rtol=1e-5, atol=1e-5)
    state, conv = over.states[0]["recurrent", 0], over.states[0]["convolution", 0]
    recurrent = torch.as_tensor(cache.layers[0].recurrent_states[0])[0]
    torch.testing.assert_close(state, recurrent, rtol=1e-5, atol=1e-5)
    expected = torch.as_tensor(cache.layers[0].conv_states[0])[0]
    torch.testing.assert_close(conv[:, -3:], expected[:, -3:], rtol=1e-5, atol=1e-5)
    if over.latent:  # Kimi-Linear, whose kernels vLLM has for GPUs alone: pages of its shapes
        pages = [torch.zeros(2, 3, len(conv)), torch.zeros(2, *state.mT.shape)]
        layer = SimpleNamespace(mamba_type=SimpleNamespace(name="GDN_ATTN"), projection_size=16, kv_cache=pages)
        over.write(0, layer, SequenceBlocks([1], 32), (0, len(IDS)), WorkerPart(0, 1))
        torch.testing.assert_close(pages[0][1].mT, expected[:, -3:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pages[1][1].mT, recurrent, rtol=1e-5, atol=1e-5)
    assert health(address)["held"]
    lease.close()
    assert until(lambda: not health(address)["held"])


@pytest.mark.parametrize(("name", "hosts"), [("qwen3_next", False), ("kimi_linear", False), ("qwen3_next", True)])
def test_what_ranks_hand_over_is_one_process_s(ranks, tmp_path, name, hosts):
    pytest.importorskip("transformers")
    if hosts:
        pytest.importorskip("nixl", reason="no NIXL here; bash launch/vllm.sh has it")
    found = ranks.run(3, read_and_compare, str(tmp_path), name, hosts)[0]
    assert found == {"errors": [], "left": []}
