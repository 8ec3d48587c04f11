"""The command, as it is typed: two ranks in processes of their own, asked over HTTP and stopped by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from ring_la import ContextParallel
from ring_la.cli.serve import stopped_by_signals
from ring_la.inference import generate
from ring_la.models import HybridLM
from ring_la.serving import Engine, Event, Failed, Hybrid, Lookout, NoText
from ring_la.testing.processes import free_port
from tests.serving.test_engine import Asked
from tests.serving.test_load import hybrid
from tests.support.generation import make
from tests.support.pool import group

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

PROMPT = "one sequence over many ranks"


def start(rank: int, port: int, *arguments: str, size: int = 2) -> subprocess.Popen:
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ring_la", "serve", *arguments]
    environment = os.environ | {name: str(x) for name, x in job.items()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def port_of(said: str) -> int:
    return int(said.split(",")[0].rsplit(":", 1)[1])


def health(port: int, wanted: Callable[[int], bool]) -> tuple[int, str]:
    """What /health says when it says what is wanted, or after 15 seconds."""
    deadline = time.monotonic() + 15
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        said = json.loads(answer.read())["status"]
        connection.close()
        if wanted(answer.status) or time.monotonic() > deadline:
            return answer.status, said
        time.sleep(0.2)


def check_client(port: int, model: HybridLM) -> None:
    """What OpenAI's own client reads is what the model says, in both forms, whole and streamed."""
    openai = pytest.importorskip("openai")
    address = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0, timeout=60)
    assert [m.id for m in client.models.list()] == ["demo"]
    want = bytes(generate(model, torch.tensor([list(PROMPT.encode())]), 6)[0].tolist()).decode(errors="replace")
    fields = dict(model="demo", max_tokens=6, temperature=0)
    parts = list(client.completions.create(prompt=PROMPT, stream=True, **fields))
    assert "".join(part.choices[0].text for part in parts) == want
    shares = client.get(f"{address}/shares/{parts[0].id}", cast_to=object)["data"][0]
    assert [sum(b - a for a, b in runs) for runs in shares["read"]] == [14 + 6, 14 + 6]  # all ranks decode
    assert [sum(b - a for a, b in runs) for runs in shares["held"]] == [14, 14]  # what is kept of the prompt
    whole = client.completions.create(prompt=PROMPT, logprobs=2, **fields)
    assert (whole.choices[0].text, len(whole.choices[0].logprobs.top_logprobs)) == (want, 6)
    said = f"user:\n{PROMPT}\n\nassistant:\n"
    want = bytes(generate(model, torch.tensor([list(said.encode())]), 6)[0].tolist()).decode(errors="replace")
    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(messages=messages, n=2, logprobs=True, **fields)
    assert [choice.message.content for choice in chat.choices] == [want, want]
    assert len(chat.choices[1].logprobs.content) == 6
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **fields))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want
    with pytest.raises(openai.BadRequestError, match="temperature: expected") as error:
        client.chat.completions.create(messages=messages, model="demo", temperature=1e-9)
    assert error.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()


@pytest.mark.distributed
def test_two_ranks_answer_over_http_and_stop_by_a_signal(tmp_path: Path):
    model = hybrid()
    torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, tmp_path / "checkpoint.pt")
    port = free_port()
    options = ["--port", "0", "--name", "demo", "--piece", "5", "--request-log", "off", "--api-key", "key"]
    ranks = [start(r, port, str(tmp_path), *options) for r in range(2)]
    try:
        said = ranks[0].stdout.readline()
        assert said.startswith("ring-la serve: demo on http://127.0.0.1:"), said + ranks[0].stdout.read()
        check_client(port_of(said), model)
        ranks[1].send_signal(signal.SIGSTOP)
        assert health(port_of(said), lambda status: status != 200) == (503, "stalled")
        ranks[1].send_signal(signal.SIGCONT)
        assert health(port_of(said), lambda status: status == 200) == (200, "ok")
        ranks[1].send_signal(signal.SIGTERM)  # any of them
        ends = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], ends
        assert ends == ["ring-la serve: stopped\n", ""]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.distributed
def test_a_rank_that_is_stopped_ends_the_others(tmp_path: Path):
    """Processes, too: what they have posted for the one that is stopped keeps none of them."""
    model = hybrid()
    torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, tmp_path / "checkpoint.pt")
    port = free_port()
    options = [str(tmp_path), "--port", "0", "--timeout", "5", "--request-log", "off"]
    ranks = [start(r, port, *options, size=3) for r in range(3)]
    try:
        said = ranks[0].stdout.readline()
        assert "http://" in said, said + ranks[0].stdout.read()
        connection = HTTPConnection("127.0.0.1", port_of(said), timeout=60)
        fields = {"prompt": PROMPT, "max_tokens": 1_000_000, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(fields))
        answer = connection.getresponse()
        answer.readline()
        ranks[1].send_signal(signal.SIGSTOP)
        assert '"the server has failed (PeerError)"' in answer.read().decode()
        for rank in (ranks[0], ranks[2]):
            assert "no sign of life from rank 1" in rank.communicate(timeout=40)[0]
            assert rank.returncode == 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_signal_is_kept_inside_a_piece():
    server = Engine(Hybrid(make()), NoText(), patience=0.3)
    began = threading.Event()

    def read(ids, states, cp):
        began.set()
        for _ in range(200):
            time.sleep(0.05)
        raise AssertionError("a piece of ten seconds went on")

    def stop() -> None:
        began.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    server.model.read = read
    server.submit(job := Asked([3], 4))
    threading.Thread(target=stop).start()
    start = time.monotonic()
    with stopped_by_signals(server), Lookout(server, None):
        server.run()
    assert time.monotonic() - start < 5
    assert job.events == [Failed("the server has stopped")]


def check_late_everywhere(rank: int) -> tuple[list[Event], float]:
    """Rank 1 alone gets a signal, inside a piece in which both wait for one another."""
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=30)
    server = Engine(Hybrid(make()), NoText(), cp, patience=0.3)

    def read(ids, states, cp):
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)
        for _ in range(200):
            time.sleep(0.05)

    server.model.read = read
    job = Asked([3], 4)
    if rank == 0:
        server.submit(job)
    start = time.monotonic()
    with stopped_by_signals(server), Lookout(server, cp):
        server.run()
    return job.events, time.monotonic() - start


def test_a_signal_to_one_rank_is_kept_on_all(ranks):
    leader, follower = ranks.run(2, check_late_everywhere, dying=())
    ranks.stop()  # their messages are half exchanged
    assert leader[0] == [Failed("the server has stopped")]
    assert max(leader[1], follower[1]) < 9
