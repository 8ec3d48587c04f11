"""`ring-la serve` on three ranks, as it is typed: a rank goes wrong while a prompt is read, or tokens are decoded."""

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
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ring_la.models import HybridConfig, HybridLM
from ring_la.testing.processes import free_port

from .job import TIMEOUT, VICTIM, Said
from .moments import FAULTS

SIZE = 3
PROMPT = "one sequence over many ranks "
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
LONG = 120_000
"""Characters of a prompt that takes many seconds, and tokens of an answer that does."""


def rows() -> Iterator[dict[str, Any]]:
    """A row for each fault at each moment."""
    with tempfile.TemporaryDirectory() as folder:
        model = HybridLM(HybridConfig(256, 16, ["gdn", "attention"], 2))
        torch.save({"config": model.config.to_dict(), "model": model.state_dict()}, Path(folder) / "checkpoint.pt")
        for moment in ("serving, a prompt is read", "serving, tokens are decoded"):
            for fault in FAULTS:
                port = free_port()
                said = [s._asdict() for s in under(folder, port, moment, fault)]
                again = restarted(folder, port)
                yield {"moment": moment, "fault": fault, "said": said, "restart": again, "left behind": []}


class Running(NamedTuple):
    """A server's ranks and its port."""

    ranks: list[subprocess.Popen]
    http: int

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def under(folder: str, port: int, moment: str, fault: str) -> list[Said]:
    """What /health, two requests and each rank that lives say after a fault."""
    answers = list[tuple[str, float]]()
    server = start(folder, port, fault)
    try:
        one_bad_request(server.http)
        fields = {"prompt": PROMPT * (LONG // len(PROMPT)) if "read" in moment else PROMPT, "max_tokens": LONG}
        asking = [threading.Thread(target=heard, args=(server.http, fields, answers)) for _ in range(2)]
        for one in asking:
            one.start()
        time.sleep(3.0)
        server.ranks[VICTIM].send_signal(SIGNALS.get(fault, signal.SIGUSR1))
        begin = time.monotonic()
        said = [Said(0, *unwell(server.http, begin)), *endings(server, fault, begin)]
        for one in asking:
            one.join(10)
        errors = [(answer, when) for answer, when in answers if '"error"' in answer]
        last = max((when - begin for _, when in errors), default=0.0)
        message = errors[0][0].strip().rpartition("data: ")[2] if errors else str(answers)[-160:]
        said.insert(1, Said(0, f"{len(errors)} of 2 requests have an error", message, last))
        return said
    finally:
        server.end()


def restarted(folder: str, port: int) -> str:
    """Seconds to the first answer of the next server."""
    begin = time.monotonic()
    server = start(folder, port, "none")
    try:
        answer = ask(server.http, {"prompt": PROMPT, "max_tokens": 4})
        return f"{time.monotonic() - begin:.1f} s" if "token_ids" in answer else answer
    finally:
        server.end()


def heard(http: int, fields: dict[str, Any], answers: list[tuple[str, float]]) -> None:
    """Ask, and note the answer and when it ended."""
    answers.append((ask(http, fields), time.monotonic()))


def one_bad_request(http: int) -> None:
    """A request that all ranks refuse alike, which the server outlives."""
    answer = ask(http, {"prompt": "", "max_tokens": 4}) + ask(http, {"prompt": PROMPT, "max_tokens": 4})
    if '"error"' not in answer or "token_ids" not in answer:
        raise RuntimeError(f"before the fault: {answer}")


def endings(server: Running, fault: str, begin: float) -> list[Said]:
    """The last line of each rank that is to end by itself, and when it did."""
    found, gone = list[Said](), [VICTIM] if fault in (*SIGNALS, "wedged") else []
    for rank, process in enumerate(server.ranks):
        if rank in gone:
            continue
        try:
            text = process.communicate(timeout=max(1.0, begin + 60 - time.monotonic()))[0]
            lines = [line for line in text.splitlines() if line.startswith("ring-la serve: ")]
            message = "\n".join([*lines[-1:], *(line for line in text.splitlines() if line.startswith("  rank "))])
            found.append(Said(rank, name(text), f"status {process.returncode}: {message}", time.monotonic() - begin))
        except subprocess.TimeoutExpired:
            found.append(Said(rank, "hangs", "runs on", 60.0))
    return found


def name(text: str) -> str:
    """The error that a rank's last words are about."""
    if "disagree" in text:
        return "DisagreementError"
    named = f"rank {VICTIM} (global rank {VICTIM})"
    if f"no sign of life from {named}. " in text or f"{named} died" in text:
        return "PeerError"
    return (text.strip().splitlines() or ["nothing"])[-1][:60]


def start(folder: str, port: int, fault: str) -> Running:
    """The ranks, of which one will go wrong, and the port that answers."""
    ranks = []
    for rank in range(SIZE):
        job: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE}
        job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        odd = rank == VICTIM and fault in ("wedged", "other shapes")
        how = ["benchmarks.faults.odd_rank", fault] if odd else ["ring_la", "serve"]
        command = [sys.executable, "-m", *how, folder, "--port", "0", "--timeout", str(int(TIMEOUT)), "--piece", "512"]
        environment = os.environ | {name: str(x) for name, x in job.items()}
        streams: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ranks.append(subprocess.Popen([*command, "--request-log", "off"], env=environment, **streams))
    assert ranks[0].stdout is not None
    line = ranks[0].stdout.readline()
    if "http://" not in line:
        raise RuntimeError(line + ranks[0].stdout.read())
    return Running(ranks, int(line.split(",")[0].rsplit(":", 1)[1]))


def ask(port: int, fields: dict[str, Any]) -> str:
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"temperature": 0, "stream": True, **fields}))
        return connection.getresponse().read().decode()
    except (OSError, HTTPException) as error:
        return f"{type(error).__name__}: {error}"


def unwell(port: int, begin: float) -> tuple[str, str, float]:
    """What /health says first that is not ok, all of it, and when."""
    while time.monotonic() < begin + 30:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            said = answer.read().decode()
            if answer.status != 200:
                return f"{answer.status} {json.loads(said)['status']}", f"/health: {said}", time.monotonic() - begin
        except OSError as error:
            return type(error).__name__, "/health", time.monotonic() - begin
        time.sleep(0.1)
    return "200 ok", "/health", 30.0
