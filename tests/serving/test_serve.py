"""The command, as it is typed: two ranks in processes of their own, asked over HTTP and stopped by a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from ring_la.inference import generate
from tests.serving.test_load import hybrid

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

PROMPT = "one sequence over many ranks"


def start(rank: int, port: int, *arguments: str) -> subprocess.Popen:
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ring_la", "serve", *arguments]
    environment = os.environ | {name: str(x) for name, x in job.items()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.distributed
def test_two_ranks_answer_over_http_and_stop_by_a_signal(tmp_path: Path):
    model = hybrid()
    torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, tmp_path / "checkpoint.pt")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [start(r, port, str(tmp_path), "--port", "0", "--name", "demo", "--piece", "5") for r in range(2)]
    try:
        said = ranks[0].stdout.readline()
        assert said.startswith("ring-la serve: demo on http://127.0.0.1:"), said + ranks[0].stdout.read()
        connection = HTTPConnection("127.0.0.1", int(said.split(",")[0].rsplit(":", 1)[1]), timeout=60)
        fields = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(fields))
        lines = connection.getresponse().read().decode().split("\n\n")
        assert lines[-2] == "data: [DONE]"
        parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        want = generate(model, torch.tensor([list(PROMPT.encode())]), 6)[0].tolist()
        assert [i for part in parts for i in part["token_ids"]] == want
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        ends = [rank.communicate(timeout=30)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], ends
        assert ends == ["ring-la serve: stopped\n", ""]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
