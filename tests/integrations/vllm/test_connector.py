"""Both sides of vLLM's connector without vLLM: its requests and layers are looked like, the reader's HTTP is real."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest
import torch

from ring_la.integrations.vllm.asking import Lease, ReaderError
from ring_la.integrations.vllm.fetching import Worker
from ring_la.integrations.vllm.memory import Shared
from ring_la.integrations.vllm.scheduling import ConnectorSettings, Load, Scheduler, Told
from ring_la.integrations.vllm.states import WorkerPart
from ring_la.serving.reader import Desk, Door, listen
from ring_la.serving.reader.door import Handler
from tests.integrations.vllm.test_pages import CPU, Pages, parcel, recurrent

IDS = list(range(24))


def request(name: str, tokens: int = 9) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, all_token_ids=list(range(tokens)),
        prompt_embeds=None, mm_features=[], lora_request=None, kv_transfer_params=None,
    )  # fmt: skip


def scheduler() -> Scheduler:
    return Scheduler(ConnectorSettings("unix:/none", 4, 1.0))


def test_requests_that_are_over_leave_nothing():
    mine = scheduler()
    failed, gone, read = map(request, ("failed", "gone", "read"))
    for each in (failed, gone, read):
        assert mine.wanted(each, 0) == 8
        mine.load(each, [[]], 8)
    assert [load.name for load in mine.said().new] == ["failed", "gone", "read"]
    mine.forget("gone")
    assert mine.said().given_up == ["gone"]
    mine.ended({"failed", "gone", "read"}, {"failed", "gone"})
    assert mine.wanted(failed, 0) == 0  # vLLM reads it itself
    for each in (failed, read):
        mine.forget(each.request_id)
    assert mine.said().given_up == []
    assert (mine._ours, mine._under_way) == (set(), {})


def test_the_reader_is_not_asked_for_the_little_that_vllm_s_cache_lacks():
    assert [scheduler().wanted(request("a"), known) for known in (0, 4, 5, 8)] == [8, 4, 0, 0]


def test_a_request_that_was_preempted_is_asked_for_under_another_name():
    """It has more tokens by then, and workers that were slower may still hold what came before."""
    mine = scheduler()
    for tokens in (9, 12):
        mine.load(request("a", tokens), [[]], tokens - 1)
        mine.ended({"a"}, ())
    first, again = mine.said().new
    assert (first.name, len(first.ids), len(again.ids)) == (again.name, 8, 11)
    assert first.asked != again.asked


@pytest.fixture
def door(tmp_path, monkeypatch):
    assert Handler.timeout == 60
    monkeypatch.setattr(Handler, "timeout", 0.4)
    desk, address = Desk(), f"unix:{tmp_path}/socket"
    with Door(listen(address), desk, lambda ids: None, dict):
        yield desk, address


def worker(rank: int, address: str) -> Worker:
    """The rank-th of two: a layer with keys in blocks of 8 tokens, and one with a state."""
    layers = {"layers.0.attn": Pages(1, 4, 8), "layers.1.mixer": recurrent("MAMBA1", (3, 3), (3, 5))}
    sizes = {"layers.0.attn": 8, "layers.1.mixer": 1024}
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=SimpleNamespace(block_size=n)) for name, n in sizes.items()
    ]
    return Worker(layers, groups, WorkerPart(rank, 2), 2, ConnectorSettings(address, 4, 20.0))


def ended(workers: list[Worker]) -> list[tuple[set[str], set[str]]]:
    """What each says of the request it ends first."""
    out, limit = [], time.monotonic() + 10
    for each in workers:
        while not (said := each.results())[0] and time.monotonic() < limit:
            time.sleep(0.02)
        out.append(said)
    return out


def test_workers_fetch_into_blocks_of_any_size_and_requests_fail_alone(door, tmp_path):
    desk, address = door
    memory, workers = Shared(CPU, tmp_path), [worker(rank, address) for rank in range(2)]
    k, v = torch.randn(2, 24, 2, 4)
    channels, state = torch.randn(6, 3), torch.randn(6, 5)
    tensors = [(0, "key", 0, k), (0, "value", 0, v), (1, "convolution", 0, channels), (1, "recurrent", 0, state)]
    said = parcel(memory, torch.arange(24), tensors)

    def started(name: str, blocks: list[list[int]]) -> None:
        for each in workers:
            each.start(Told([Load(name, f"{name} of this vLLM", IDS, 3, blocks)]))

    started("read", [[2, 0, 1], [3]])
    desk.finish(desk.next(1, 10.0), [said])
    assert ended(workers) == [({"read"}, set())] * 2
    for rank, each in enumerate(workers):
        pages, mixer = each._layers["layers.0.attn"].kv_cache[:, :24], each._layers["layers.1.mixer"]
        assert torch.equal(pages[0].view(3, 8, 4)[[2, 0, 1]].flatten(0, 1)[3:], k[3:, rank])
        assert not pages[:, 16:19].any()  # vLLM had these
        assert torch.equal(mixer.kv_cache[1][3], state[3 * rank : 3 * rank + 3])
        assert mixer.kv_cache[0][:3].isnan().all()
    started("no block for the state", [[2, 0, 1], [-1]])
    desk.finish(desk.next(2, 10.0), [said])
    assert ended(workers) == [({"no block for the state"}, {"no block for the state"})] * 2
    assert workers[0]._layers["layers.1.mixer"].kv_cache[0][3].isfinite().all()  # the last block is another's
    started("given up", [[2, 0, 1], [3]])
    desk.next(3, 10.0)
    for each in workers:
        each.start(Told(given_up=["given up"]))
    assert ended(workers) == [({"given up"}, {"given up"})] * 2
    started("the reader dies", [[2, 0, 1], [3]])
    desk.next(4, 10.0)
    desk.close("the reader has lost a rank")
    assert ended(workers) == [({"the reader dies"}, {"the reader dies"})] * 2
    assert not any(each._leases for each in workers)
    memory.close()


def test_who_is_given_up_before_it_asks_is_not_read(door):
    desk, address = door
    lease = Lease(address, 5.0)
    lease.close()
    with pytest.raises(ReaderError, match="was given up"):
        lease.parcels("late", torch.tensor(IDS))
    assert desk.next(1, 0.1) is None


def test_who_says_nothing_is_shown_out_and_who_waits_is_not(door):
    desk, address = door
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(5)
        silent.connect(address.removeprefix("unix:"))
        silent.sendall(b"POST /read?prompt=a HTTP/1.1\r\nContent-Le")
        assert silent.recv(100) == b""
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(5)
        waiting.connect(address.removeprefix("unix:"))
        waiting.sendall(b"POST /read?prompt=a HTTP/1.1\r\nContent-Length: 8\r\n\r\n" + bytes(8))
        asked = desk.next(1, 5.0)
        desk.finish(asked, [{"rank": 0}])
        assert waiting.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.8)
        assert asked.here == 1  # it may take its time with what it got


def test_memory_that_cannot_be_had_leaves_no_file(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    memory = Shared(CPU, tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        memory.room(1, 100)
    assert [path.name for path in memory._folder.iterdir()] == ["lock"]
    memory.close()
