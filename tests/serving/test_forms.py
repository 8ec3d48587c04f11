"""What requests may ask for beyond tokens: chats, several completions, probabilities, penalties; counts and keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import torch

from ring_la import ArgumentError
from ring_la.inference import Sampler, prefill
from ring_la.serving.sampling import Chooser, Choosers

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from ring_la.serving.http import Options
from ring_la.serving.keys import parsed
from ring_la.serving.records import log_to
from tests.serving.test_http import PROMPT, Client, greedy, model, text

KEYS = ("first", "second")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    with Client(Options(20_000, log=log_to(str(log)))) as client:
        client.log = log
        yield client


def logits(ids: list[int]) -> torch.Tensor:
    return prefill(model(), torch.tensor([ids])).logits[0]


def events(body: bytes) -> list[dict]:
    *parts, end, _ = body.decode().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_bias_and_penalties_are_openai_s():
    torch.manual_seed(0)
    chooser = Chooser(Sampler(), {3: 1.5, 5: -100.0}, presence=0.7, frequency=0.4)
    choosers = Choosers(torch.device("cpu"))
    choosers.seat(0, chooser, 9)
    counts = torch.zeros(9)
    for _ in range(12):
        z = torch.randn(1, 9)
        want = z[0].double() - 0.4 * counts - 0.7 * (counts > 0)
        want[3] += 1.5
        want[5] -= 100.0
        token = int(choosers.choose(z, chooser.ways))
        assert token == int(want.argmax())
        counts[token] += 1
    assert counts.max() > 1


def test_probabilities_of_a_completion(client):
    said = client.complete(max_tokens=4, logprobs=2)["choices"][0]
    ids, told = greedy(PROMPT, 4), said["logprobs"]
    assert said["token_ids"] == ids
    assert told["tokens"] == [chr(i) if i < 128 else f"bytes:\\x{i:02x}" for i in ids]
    for i in range(4):
        own = logits([*PROMPT.encode(), *ids[:i]]).log_softmax(-1)
        assert told["token_logprobs"][i] == pytest.approx(float(own[ids[i]]), abs=1e-4)
        assert sorted(told["top_logprobs"][i].values()) == pytest.approx(sorted(own.topk(2).values.tolist()), abs=1e-4)
    assert told["text_offset"][0] == 0


def test_several_prompts_and_completions_of_each(client):
    fields = {"temperature": 1.0, "max_tokens": 5}
    alone = [[client.complete(prompt=p, seed=s, **fields)["choices"][0]["token_ids"] for s in (7, 8)] for p in "ab"]
    said = client.complete(prompt=["a", "b"], n=2, seed=7, echo=True, **fields)
    assert [c["token_ids"] for c in said["choices"]] == [ids for each in alone for ids in each]
    assert [(c["index"], c["text"][0]) for c in said["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert said["usage"]["prompt_tokens"] == 2
    body = {"prompt": ["a", "b"], "n": 2, "seed": 7, "stream": True, **fields}
    parts = events(client.open("POST", "/v1/completions", body).getresponse().read())
    for i, want in enumerate(ids for each in alone for ids in each):
        mine = [c for part in parts for c in part["choices"] if c["index"] == i]
        assert [t for c in mine for t in c["token_ids"]] == want
        assert [c["finish_reason"] is None for c in mine] == [True] * (len(mine) - 1) + [False]


def test_a_chat(client):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    ids = greedy("system:\nBe brief.\n\nuser:\nHi\n\nassistant:\n", 6)
    fields = {"messages": messages, "max_completion_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    fields |= {"service_tier": "auto", "store": False, "tools": [], "tool_choice": "none"}  # ask for nothing
    status, said = client.ask("POST", "/v1/chat/completions", fields)
    assert status == 200, said
    choice = said["choices"][0]
    assert (said["object"], choice["token_ids"], choice["finish_reason"]) == ("chat.completion", ids, "length")
    assert choice["message"] == {"role": "assistant", "content": text(ids), "refusal": None}
    first = choice["logprobs"]["content"][0]
    assert (first["bytes"], first["top_logprobs"][0]["bytes"]) == ([ids[0]], [ids[0]])  # the likeliest
    parts = events(client.open("POST", "/v1/chat/completions", fields | {"stream": True}).getresponse().read())
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text(ids)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "expected a list of at least one message, got an empty list"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "one of system, developer, user"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role", "one of system, developer, user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a string, or a list of parts of text, got nothing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            '{"type": "text", "text": …}, got {"type": "image_url"}',
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls", "got [1]"),
        ({"tools": [{}]}, "tools", "expected nothing or [], got [{}]"),
        ({"top_logprobs": 2}, "top_logprobs", "expected with logprobs=true, got 2"),
        ({"logprobs": 2}, "logprobs", "expected true or false, got 2"),
    ],
)
def test_bad_fields_of_chats_are_named(client, fields, param, message):
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields
    status, said = client.ask("POST", "/v1/chat/completions", asked)
    assert (status, said["error"]["param"]) == (400, param)
    assert message in said["error"]["message"]


def test_a_request_leaves_a_line_counts_and_its_shares(client):
    before = len(client.log.read_text().splitlines())
    said = client.complete(prompt="never said before", max_tokens=3)
    client.ask("POST", "/v1/completions", {"prompt": "secret", "n": 0})
    done, refused = map(json.loads, client.log.read_text().splitlines()[before:])
    count = {"prompt_tokens": 17, "cached_tokens": 0, "completion_tokens": 3, "ends": ["length"]}
    assert done | count | {"id": said["id"], "outcome": "done", "status": 200, "client": "127.0.0.1"} == done
    assert 0 < done["first_token_s"] <= done["seconds"]
    assert (refused["outcome"], refused["status"], refused["param"]) == ("refused", 400, "n")
    assert "secret" not in client.log.read_text()
    counts = client.open("GET", "/metrics").getresponse().read().decode()
    found = dict(line.rsplit(" ", 1) for line in counts.splitlines() if not line.startswith("#"))
    assert float(found['ring_la_requests_total{outcome="refused"}']) >= 1
    assert float(found["ring_la_first_token_seconds_count"]) >= 1
    assert float(found["ring_la_kept_states"]) >= 1
    assert {"ring_la_waiting", "ring_la_token_seconds_sum", "process_resident_memory_bytes"} <= set(found)
    shares = client.ask("GET", f"/shares/{said['id']}")[1]["data"][0]
    assert (shares["read"], shares["held"], shares["ended"]) == ([[[0, 20]]], [[[0, 17]]], True)
    assert client.ask("GET", "/shares/other")[0] == 404


def test_the_page_asks_nobody_else(client):
    answer = client.open("GET", "/").getresponse()
    page = answer.read().decode()
    assert (answer.status, answer.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    assert all(path in page for path in ("v1/completions", "v1/chat/completions", "shares/"))
    assert set(re.findall(r"\w+://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "default-src 'none'" in answer.getheader("Content-Security-Policy")


def test_keys():
    with Client(Options(keys=KEYS)) as client:
        asked = json.dumps({"prompt": "a", "max_tokens": 1})
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer other"}, 401),
            ({"Authorization": "Basic first"}, 401),
            ({"Authorization": "Bearer first"}, 200),
            ({"Authorization": "bearer second"}, 200),
        ):
            answer = client.open("POST", "/v1/completions", asked, headers).getresponse()
            said = json.loads(answer.read())
            assert answer.status == status
            assert status == 200 or said["error"]["code"] == "invalid_api_key"
        assert client.ask("GET", "/health")[0] == 200
        assert [client.ask("GET", path)[0] for path in ("/metrics", "/v1/models", "/shares/a")] == [401] * 3
    assert parsed([], " a, b ,") == ("a", "b")
    assert parsed(["c"], "a") == ("c",)
    with pytest.raises(ArgumentError, match="api_key: expected keys of printable ASCII"):
        parsed(["ä"], None)
