"""`ring-la serve` on two ranks, as it is typed: a rank is killed or stopped under a request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

from ring_la.models import HybridConfig, HybridLM

from .job import TIMEOUT, VICTIM, Said, free_port

PROMPT = "one sequence over many ranks " * 40


def rows() -> Iterator[dict[str, Any]]:
    """A row for each fault."""
    with tempfile.TemporaryDirectory() as folder:
        model = HybridLM(HybridConfig(256, 16, ["gdn", "attention"], 2))
        torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, Path(folder) / "checkpoint.pt")
        for fault, number in (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
            yield _under(folder, fault, number)


def _under(folder: str, fault: str, number: int) -> dict[str, Any]:
    port, said = free_port(), []
    ranks, http = _start(folder, port)
    try:
        asked = threading.Thread(target=lambda: said.append(_ask(http, 100_000)))
        asked.start()
        time.sleep(1.0)
        ranks[VICTIM].send_signal(number)
        start = time.monotonic()
        health = _unwell(http, start)
        after: list[str] = []
        next_one = threading.Thread(target=lambda: after.append(_ask(http, 4)))
        next_one.start()
        try:
            text = ranks[0].communicate(timeout=60)[0]
            ended = f"rank 0 ends with {ranks[0].returncode}: {text.strip().splitlines()[-1] if text.strip() else ''}"
        except subprocess.TimeoutExpired:
            ended = "rank 0 runs on"
        seconds = time.monotonic() - start
        lines = [Said(0, health[0], "/health", health[1]), Said(0, _name(ended), ended, seconds)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    start = time.monotonic()
    ranks, http = _start(folder, port)
    answer = _ask(http, 4)
    for rank in ranks:
        rank.kill()
        rank.wait()
    restart = f"{time.monotonic() - start:.1f} s" if "token_ids" in answer else answer
    return {"moment": "serving", "fault": fault, "said": [s._asdict() for s in lines], "restart": restart,
            "left behind": []}  # fmt: skip


def _name(ended: str) -> str:
    return "PeerError" if "PeerError" in ended or "sign of life" in ended or "did not listen" in ended else ended[:60]


def _start(folder: str, port: int) -> tuple[list[subprocess.Popen], int]:
    """Two ranks, and the port that answers."""
    ranks = []
    for rank in range(2):
        job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        job |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "ring_la", "serve", folder, "--port", "0", "--timeout", str(int(TIMEOUT))]
        environment = os.environ | {name: str(x) for name, x in job.items()}
        streams: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ranks.append(subprocess.Popen(command, env=environment, **streams))
    assert ranks[0].stdout is not None
    line = ranks[0].stdout.readline()
    if "http://" not in line:
        raise RuntimeError(line + ranks[0].stdout.read())
    return ranks, int(line.split(",")[0].rsplit(":", 1)[1])


def _ask(port: int, tokens: int) -> str:
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        fields = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(fields))
        return connection.getresponse().read().decode()
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def _unwell(port: int, start: float) -> tuple[str, float]:
    """What /health says first that is not ok, and when."""
    while time.monotonic() < start + 30:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            said = json.loads(answer.read())["status"]
            if answer.status != 200:
                return f"{answer.status} {said}", time.monotonic() - start
        except OSError as error:
            return type(error).__name__, time.monotonic() - start
        time.sleep(0.1)
    return "200 ok", 30.0
