"""OpenAI's protocol over a socket: answers whole and in pieces, errors that name the field, clients that go away."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest
import torch

from ring_la import ArgumentError
from ring_la.inference import generate
from ring_la.models import HybridConfig, HybridLM
from ring_la.serving import Bytes, Engine, Hybrid

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from ring_la.serving.bodies import read
from ring_la.serving.connections import listen
from ring_la.serving.fields import short
from ring_la.serving.http import Options, Server, application
from tests.serving import drawn

PROMPT = "def hello"
SILENT = 0.5
"""Seconds after which a connection is closed that says nothing."""


def model() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(HybridConfig(257, 32, ["gdn", "attention"], 2, mlp_dim=32))


class Client:
    """A server in this process, and one connection a request."""

    def __init__(self, options: Options | None = None) -> None:
        self.engine = Engine(Hybrid(model()), Bytes(257), max_tokens=4096, keep=1 << 24, patience=0.5)
        self._listening = listen("127.0.0.1", 0)
        self.port = self._listening.getsockname()[1]
        app = application(self.engine, "small", options=options or Options(20_000, SILENT))
        self.server = Server(app, self.engine, self._listening, silent=SILENT)
        self._answering = threading.Thread(target=self.engine.run)

    def __enter__(self) -> Client:
        self.server.__enter__()
        self._answering.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self._answering.join()
        self.server.__exit__()

    def open(self, method: str, path: str, body: object = None, headers: dict | None = None) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = body if isinstance(body, (str, bytes, type(None))) else json.dumps(body)
        connection.request(method, path, body, headers or {})
        return connection

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        answer = (connection := self.open(method, path, body)).getresponse()
        said = json.loads(answer.read())
        connection.close()
        return answer.status, said

    def complete(self, **fields: object) -> dict:
        status, said = self.ask("POST", "/v1/completions", {"prompt": PROMPT, "temperature": 0} | fields)
        assert status == 200, said
        return said

    def idle(self) -> bool:
        deadline = time.monotonic() + 10
        while self.engine.running and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.engine.running


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as client:
        yield client


def greedy(text: str, n: int) -> list[int]:
    return generate(model(), torch.tensor([list(text.encode())]), n)[0].tolist()


def text(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def test_a_completion_has_the_greedy_tokens(client):
    said, want = client.complete(max_tokens=7, model="small"), greedy(PROMPT, 7)
    choice = said["choices"][0]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == (want, text(want), "length")
    count = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
    assert said["usage"] | count == said["usage"]
    assert said["object"] == "text_completion"
    by_ids = client.complete(prompt=list(PROMPT.encode()), max_tokens=7)
    assert by_ids["choices"] == said["choices"]
    assert by_ids["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}


def test_a_stream_has_the_tokens_one_by_one(client):
    fields = {"prompt": PROMPT, "max_tokens": 7, "temperature": 0, "stream": True}
    answer = client.open("POST", "/v1/completions", fields | {"stream_options": {"include_usage": True}}).getresponse()
    assert answer.getheader("Content-Type").startswith("text/event-stream")
    *parts, end, nothing = answer.read().decode().split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    *parts, count = [json.loads(part.removeprefix("data: ")) for part in parts]
    choices, want = [part["choices"][0] for part in parts], greedy(PROMPT, 7)
    assert [c["finish_reason"] for c in choices] == [None] * 7 + ["length"]
    assert [i for c in choices for i in c["token_ids"]] == want
    assert "".join(c["text"] for c in choices) == text(want)
    assert count["usage"]["completion_tokens"] == 7
    assert count["choices"] == []


def test_a_stop_string(client):
    want = text(greedy(PROMPT, 12))
    stop = want[5:7]
    choice = client.complete(max_tokens=12, stop=stop)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (want[: want.find(stop)], "stop")


def test_several_at_once_and_sampling(client):
    prompts = ["a", "of another length", "def f(x):\n", "a"]
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(client.complete, prompt=p, max_tokens=9, temperature=0.9, seed=5) for p in prompts]
        got = [f.result()["choices"][0]["token_ids"] for f in asked]
    for prompt, ids in zip(prompts, got):
        want = drawn.completion(model(), list(prompt.encode()), 9, temperature=0.9, seed=5)
        assert ids == (want[: want.index(256)] if 256 in want else want)


@pytest.mark.parametrize(("stream", "listens"), [(True, True), (True, False), (False, False)])
def test_a_client_that_goes_away_stops_its_decoding(client, stream, listens):
    fields = {"prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "stream": stream}
    connection = client.open("POST", "/v1/completions", fields)
    deadline = time.monotonic() + 10
    while not any(job.decoded for job in client.engine.decoding) and time.monotonic() < deadline:
        time.sleep(0.001)
    (job,) = client.engine.decoding
    if listens:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.close()
    connection.close()
    assert client.idle()
    assert 0 < job.decoded < 4000


def test_models_and_health_are_answered_and_other_paths_refused(client):
    status, said = client.ask("GET", "/v1/models")
    assert status == 200
    assert [(m["id"], m["object"], m["max_model_len"]) for m in said["data"]] == [("small", "model", 4096)]
    assert client.ask("GET", "/health") == (200, {"status": "ok", "running": 0, "waiting": 0})
    assert client.ask("GET", "/v1/models/small") == (200, said["data"][0])
    status, said = client.ask("GET", "/v1/models/a/large")
    assert (status, said["error"]["code"]) == (404, "model_not_found")
    assert client.ask("GET", "/v1/chat")[0] == 404
    assert client.ask("GET", "/v1/completions")[1]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"prompt": None},
            "prompt",
            "prompt: expected a string or a list of token ids, or a list of such, got nothing",
        ),
        ({"prompt": [1, "a"]}, "prompt", "or a list of such, got a list with a string in it"),
        ({"prompt": ["a"] * 17}, "prompt", "expected at most 16 completions in one request, got 17 prompts"),
        ({"prompt": [None]}, "prompt", "or a list of such, got a list with nothing in it"),
        ({"user": ["me"]}, "user", 'expected a string, got ["me"]'),
        ({"prompt": [1, 257]}, "prompt", "expected token ids from 0 to 256, got 257"),
        ({"prompt": ""}, "prompt", "expected at least one token, got none"),
        (
            {"prompt": "a" * 4000, "max_tokens": 97},
            "prompt",
            "at most 4096 tokens together with max_tokens",
        ),
        ({"max_tokens": 0}, "max_tokens", "expected an integer ≥ 1, got 0"),
        ({"max_tokens": True}, "max_tokens", "expected an integer ≥ 1, got true"),
        ({"temperature": "hot"}, "temperature", 'expected 0 or a number from 0.01 to 100, got "hot"'),
        ({"temperature": float("nan")}, "temperature", "expected 0 or a number from 0.01 to 100, got NaN"),
        ({"temperature": 1e-40}, "temperature", "expected 0 or a number from 0.01 to 100, got 1e-40"),
        ({"top_k": 1.5}, "top_k", "expected an integer ≥ 1, got 1.5"),
        ({"seed": 2**64}, "seed", "expected an integer from"),
        ({"stop": ["a", ""]}, "stop", "expected a string, or a list of at most 4 strings"),
        ({"stream": 1}, "stream", "expected true or false, got 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "expected with stream=true"),
        ({"top_p": 0}, "top_p", "expected a number above 0 and at most 1, got 0"),
        ({"presence_penalty": 3}, "presence_penalty", "expected a number from -2 to 2, got 3"),
        ({"n": True}, "n", "expected an integer ≥ 1, got true"),
        ({"n": 17}, "n", "expected at most 16 completions in one request, got 17"),
        ({"suffix": "a"}, "suffix", 'expected nothing, got "a"'),
        ({"logit_bias": {"257": 1}}, "logit_bias", "expected token ids from 0 to 256, got 257"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "expected an object of token ids with numbers from -100 to 100"),
        (
            {"logit_bias": False},
            "logit_bias",
            "expected an object of token ids with numbers from -100 to 100, got false",
        ),
        ({"logprobs": 6}, "logprobs", "expected an integer from 0 to 5, got 6"),
        ({"logprobs": 0, "echo": True}, "logprobs", "expected nothing together with echo, got 0"),
        ({"temprature": 1}, "temprature", "expected one of the fields echo, frequency_penalty"),
        ({"p" * 1000: 1}, "p" * 77 + "…", "expected one of the fields echo, frequency_penalty"),
    ],
)
def test_bad_fields_are_named(client, fields, param, message):
    status, said = client.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1} | fields)
    assert status == 400
    assert said["error"]["param"] == param
    assert message in said["error"]["message"]


def test_bad_bodies_are_refused(client):
    for body, message in (
        ("{", "body: expected JSON"),
        ("[]", "body: expected a JSON object, got a list"),
        ('{"prompt": "\\uD800"}', "body: expected JSON"),
        ("[" * 10_000, "body: expected JSON"),
        ("x" * 30_000, "body: expected at most 20000 bytes"),
        (b"\xff", "body: expected JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "body: expected JSON"),
        ('{"prompt": "\\ud800"}'.encode("utf-16"), "body: expected JSON"),
    ):
        status, said = client.ask("POST", "/v1/completions", body)
        assert (status, said["error"]["param"]) == (400, "body")
        assert message in said["error"]["message"]
    status, said = client.ask("POST", "/v1/completions", {"prompt": "a", "model": "large"})
    assert (status, said["error"]["code"]) == (404, "model_not_found")
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    assert short(deep) == "a list, too deep to be told"
    with socket.create_connection(("127.0.0.1", client.port), timeout=4) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 20001\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")  # before any of it is sent


def test_a_stopping_server_ends_streams_and_refuses_requests():
    with Client() as client:
        client.engine.text.end = frozenset()  # it goes on until it is stopped
        fields = {"prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "stream": True}
        answer = client.open("POST", "/v1/completions", fields).getresponse()
        answer.readline()
        whole = client.open("POST", "/v1/completions", fields | {"stream": False})
        while client.engine.running < 2:
            time.sleep(0.02)
        client.engine.stop()
        status, said = client.ask("POST", "/v1/completions", {"prompt": PROMPT})
        assert (status, said["error"]["code"]) == (503, "busy")
        assert client.ask("GET", "/health")[0] == 503
        assert "the server has stopped" in answer.read().decode()
        ended = whole.getresponse()  # not its fault, and another server can answer it
        assert (ended.status, ended.headers["Retry-After"]) == (503, "1")
        assert json.loads(ended.read())["error"]["message"] == "the server has stopped"


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0) as taken, pytest.raises(ArgumentError, match="port: expected an address"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_too_many_requests(client, monkeypatch):
    monkeypatch.setattr(client.engine._waiting, "most", 0)
    answer = client.open("POST", "/v1/completions", {"prompt": PROMPT}).getresponse()
    assert (answer.status, answer.getheader("Retry-After")) == (429, "1")
    assert json.loads(answer.read())["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize(
    "said",
    [
        (b"",),
        (b"GET /hea",),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /hea"),
    ],
    ids=["nothing", "half a head", "half a body", "half of a second"],
)
def test_connections_that_say_nothing_more_are_closed(client, said):
    with socket.create_connection(("127.0.0.1", client.port), timeout=4) as connection:
        for part in said:
            connection.sendall(part)
            time.sleep(0.2)
        heard = b"".join(iter(lambda: connection.recv(4096), b""))
    assert heard.startswith(b"HTTP/1.1 408") == (b"POST" in said[0])


def test_peers_that_vanished_are_noticed():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_client_that_leaves_while_it_speaks_leaves_no_traceback(client):
    records, handler = [], logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("uvicorn.error")
    log.addHandler(handler)
    try:
        with socket.create_connection(("127.0.0.1", client.port), timeout=4) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.1)
        time.sleep(0.2)
        assert client.ask("GET", "/health")[0] == 200
    finally:
        log.removeHandler(handler)
    assert records == []


def test_a_large_body_holds_up_nobody():
    data = json.dumps({"prompt": [1] * 6_000_000}).encode()
    with ThreadPoolExecutor(1) as pool:
        start = last = time.monotonic()
        got, longest = pool.submit(read, data), 0.0
        while not got.done():
            time.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert len(got.result()["prompt"]) == 6_000_000
    assert longest < (last - start) / 3
