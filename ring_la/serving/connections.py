"""Connections that end: those on which nothing is said, and those whose other side is gone."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..errors import ArgumentError

SILENT = 60.0
"""Seconds that a client may be silent in the middle of a request, and that what is sent may stay unread."""


def protocol(silent: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which closes a connection without a whole request's head after `silent` seconds."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._mind()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._mind()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _mind(self) -> None:
            """Keep an eye on it while it has no request."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(silent, self._late)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._timer = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Impatient


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one.

    Its connections end when the other side has not answered the system for `SILENT` seconds.

    Raises:
        ArgumentError: it cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as e:
        raise ArgumentError("port", "an address this host has and nobody listens on", f"{host}:{port} ({e})") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its connections inherit all of these
    tcp = {"TCP_KEEPIDLE": SILENT / 2, "TCP_KEEPINTVL": SILENT / 6, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": SILENT * 1000}
    for name, value in tcp.items():
        if hasattr(socket, name):  # not every system has all of them
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))
    return listening
