"""The HTTP that a reader is asked by, on a socket of the host.

POST /read?prompt=NAME&takers=N     body: the prompt's tokens, int64, little end first
    200 {"parcels": [...]}          once it is read; it stays in memory until the connection is closed
    400, 413, 503 {"error": ...}    not like this; not now
GET /health                         {"ranks": P, "least": tokens, "waiting": prompts, "held": bytes of rank 0}
"""

from __future__ import annotations

import json
import os
import select
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor

from ...errors import ArgumentError
from .desk import AskedPrompt, Desk, Unread

PEEK = 0.25
"""Seconds between two looks whether who waits is still there."""
SILENT = 60.0
"""Seconds without a word after which a connection is closed that has asked for nothing, or for half of it."""
TOKEN = 8
"""Bytes of a token."""


class Door(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """A server in threads beside the one that reads; use it as a context.

    Args:
        listening: the socket. desk: where prompts go. check: raises for tokens that cannot be read.
        about: what /health says. longest: the most tokens of a prompt.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listening: socket.socket,
        desk: Desk,
        check: Callable[[Tensor], None],
        about: Callable[[], dict[str, Any]],
        longest: int = 1 << 24,
    ) -> None:
        super().__init__(listening.getsockname(), Handler)
        self.socket, self.desk, self.check, self.about, self.longest = listening, desk, check, about, longest
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    def fileno(self) -> int:
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = self.socket.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection, ("reader", 0)  # a Unix socket's peer has no address

    def __enter__(self) -> Door:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.socket.close()


class Handler(BaseHTTPRequestHandler):
    """One connection. What it has asked for is held until it ends."""

    protocol_version = "HTTP/1.1"
    timeout = SILENT
    server: Door  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        self._held: list[AskedPrompt] = []
        try:
            super().handle()
        except ConnectionError:
            pass  # who asked is gone, which is his right
        finally:
            for asked in self._held:
                self.server.desk.leave(asked)

    def do_GET(self) -> None:
        self.close_connection |= "Content-Length" in self.headers  # a body, which nobody reads
        if urlsplit(self.path).path == "/health":
            self._answer(200, self.server.about())
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def do_POST(self) -> None:
        where = urlsplit(self.path)
        if where.path != "/read":
            self.close_connection = True  # the body is not read
            self._answer(404, {"error": f"no {self.path}"})
            return
        try:
            asked = self._ask(parse_qs(where.query))
        except ArgumentError as error:
            self._answer(400, {"error": str(error)})
        except Unread as error:
            self._answer(503, {"error": str(error)})
        else:
            self._held.append(asked)
            self.connection.settimeout(None)  # from here on it may take its time
            if self._wait(asked):
                said = {"error": asked.error} if asked.error else {"parcels": asked.parcels}
                self._answer(503 if asked.error else 200, said)

    def _ask(self, query: dict[str, list[str]]) -> AskedPrompt:
        said = self.headers.get("Content-Length", "0")
        size = _number(said)
        if size is None or size % TOKEN or not 0 < size <= TOKEN * self.server.longest:
            self.close_connection = True  # the body is not read
            expected = f"int64 tokens, 1 to {self.server.longest}, with a Content-Length"
            raise ArgumentError("prompt", expected, f"{said} bytes")
        body = bytearray(self.rfile.read(size))
        if len(body) < size:
            raise ConnectionAbortedError
        name, told = query.get("prompt", [""])[0], query.get("takers", ["1"])[0]
        takers = _number(told)
        if not name or not takers:
            raise ArgumentError("prompt, takers", "a name and a number ≥ 1", f"{name!r}, {told}")
        ids = torch.frombuffer(body, dtype=torch.int64)
        self.server.check(ids)
        return self.server.desk.ask(name, ids, takers)

    def _wait(self, asked: AskedPrompt) -> bool:
        """Until the prompt is done; False: nobody waits for it any more."""
        heard = select.poll()  # select takes no more than 1024 files of a process
        heard.register(self.connection, select.POLLIN)
        while not asked.done.wait(PEEK):
            if heard.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
                self.close_connection = True
                return False
        return True

    def _answer(self, status: int, said: dict[str, Any]) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the reader says itself what it reads."""


def _number(text: str) -> int | None:
    """A number as requests say it, of at most 18 digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def listen(address: str) -> socket.socket:
    """A socket for ``unix:PATH``, which this user alone can reach, or ``HOST:PORT``.

    Raises:
        ArgumentError: it cannot be had.
    """
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        listening = socket.socket(socket.AF_UNIX)
        if path.is_socket() and not _answers(path):
            path.unlink()  # of a reader that was killed
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        except OSError as error:
            listening.close()
            raise ArgumentError("listen", "a path that is free", f"{path} ({error})") from error
        finally:
            os.umask(before)
        listening.listen(128)
        return listening
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentError("listen", "unix:PATH or HOST:PORT", repr(address))
    try:
        return socket.create_server((host, int(port)), backlog=128)
    except OSError as error:
        raise ArgumentError("listen", "an address that is free", f"{address} ({error})") from error


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
