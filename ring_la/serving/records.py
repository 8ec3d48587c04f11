"""What is known of requests afterwards: counts and times for Prometheus, and a line of JSON each.

No text of a prompt or an answer is in either.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.requests import HTTPConnection

from ..errors import ArgumentError
from .completion import Ended, Event, NewToken
from .engine import Engine

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
"""Borders of the histogram of first tokens, in seconds."""
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
"""The same of the tokens after them."""
OUTCOMES = ("done", "gone", "refused", "busy", "failed")
"""How a request ends: answered; nobody waits for it any more; its own fault; too many others; the server's fault."""


def log_to(where: str) -> logging.Logger | None:
    """Where a line goes for each request: "-": standard error, "off": nowhere, or a file, which may be rotated.

    Raises:
        ArgumentError: the file cannot be written.
    """
    if where == "off":
        return None
    try:
        handler = logging.StreamHandler(sys.stderr) if where == "-" else WatchedFileHandler(Path(where), delay=False)
    except OSError as e:
        raise ArgumentError("request_log", '"-", "off" or a file that can be written', f"{where} ({e})") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.Logger("ring_la.requests", logging.INFO)  # of this server, in no hierarchy
    log.addHandler(handler)
    return log


class Records:
    """The counts and times of an engine's requests.

    Args:
        engine: whose. log: where a line of each goes; None: nowhere.
    """

    def __init__(self, engine: Engine, log: logging.Logger | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        self.log = log
        ProcessCollector(registry=registry)
        self.requests = Counter("ring_la_requests", "Requests by how they ended", ["outcome"], registry=registry)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.prompt = Counter("ring_la_prompt_tokens", "Tokens of prompts", registry=registry)
        self.reused = Counter("ring_la_cached_tokens", "Of these, those that were not read again", registry=registry)
        self.decoded = Counter("ring_la_completion_tokens", "Tokens decoded", registry=registry)
        self.first = Histogram(
            "ring_la_first_token_seconds", "From a request to its first token", buckets=FIRST, registry=registry
        )
        self.each = Histogram("ring_la_token_seconds", "From a token to the next", buckets=EACH, registry=registry)
        device = engine.model.device
        for name, help, value in (
            ("running", "Completions under way", lambda: engine.running),
            ("waiting", "Completions that wait", lambda: engine.waiting),
            ("stopping", "1 if no request is taken any more", lambda: engine.stopping),
            ("kept_states", "States kept for prompts that begin alike", lambda: engine.remembered[0]),
            ("kept_bytes", "Bytes of them on this rank", lambda: engine.remembered[1]),
            ("device_bytes", "Bytes of tensors on rank 0's GPU", lambda: _allocated(device)),
        ):
            Gauge(f"ring_la_{name}", help, registry=registry).set_function(value)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class Record:
    """One request, from when it came to how it ended.

    Args:
        records: where it is counted. connection: whose it is.

    Attributes:
        about: what its line says of it.
    """

    def __init__(self, records: Records, connection: HTTPConnection) -> None:
        self._records = records
        client, key = connection.client, getattr(connection.state, "key", None)
        self.about: dict[str, Any] = {"id": None, "client": client and client.host, "key": key}
        self.about["path"] = connection.scope["path"]
        self._came, self._began = datetime.now(timezone.utc), time.monotonic()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._ends: list[str] = []
        self._prompt = self._reused = 0
        self._decoded: dict[int, int] = {}
        self._over = False

    def hear(self, index: int, event: Event) -> None:
        """What came of one of its completions; in the engine's thread."""
        if isinstance(event, NewToken):
            now, before = time.monotonic(), self._last.get(index)
            if before is not None:
                self._records.each.observe(now - before)
            elif self._first is None:
                self._first = now - self._began
                self._records.first.observe(self._first)
            self._last[index] = now
            self._decoded[index] = self._decoded.get(index, 0) + 1
        elif isinstance(event, Ended):
            self._ends.append(event.reason)
            self._prompt += event.prompt_tokens
            self._reused += event.reused_tokens
            self._decoded[index] = event.completion_tokens

    def end(self, outcome: str, status: int, **more: Any) -> None:
        """It is over; only the first word of that counts."""
        if self._over:
            return
        self._over, records = True, self._records
        records.requests.labels(outcome).inc()
        tokens = {"prompt_tokens": self._prompt, "cached_tokens": self._reused}
        tokens["completion_tokens"] = sum(self._decoded.values())
        for counter, count in zip((records.prompt, records.reused, records.decoded), tokens.values()):
            counter.inc(count)
        if records.log is not None:
            line = {"time": self._came.isoformat(timespec="milliseconds"), **self.about, "outcome": outcome}
            line |= {"status": status, **more, "ends": self._ends, **tokens}
            line |= {"first_token_s": self._first and round(self._first, 4)}
            line |= {"seconds": round(time.monotonic() - self._began, 4)}
            records.log.info(json.dumps(line, ensure_ascii=False))
