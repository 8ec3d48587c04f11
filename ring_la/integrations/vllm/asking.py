"""vLLM's side of a reader's HTTP: ask for a prompt, have it while the connection is open."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlencode

from torch import Tensor

from ...errors import ArgumentError, RingLAError


class ReaderError(RingLAError, RuntimeError):
    """A reader did not read a prompt: it is gone, stopped, or refused it."""


def connection(address: str, timeout: float) -> http.client.HTTPConnection:
    """A connection to ``unix:PATH`` or ``HOST:PORT``, not open yet."""
    if address.startswith("unix:"):
        return _UnixConnection(address.removeprefix("unix:"), timeout)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentError("reader", "unix:PATH or HOST:PORT", repr(address))
    return http.client.HTTPConnection(host, int(port), timeout=timeout)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Lease:
    """A prompt at a reader, from the time it is asked for until `close`; the memory stays as long.

    Args:
        address: of the reader. timeout: seconds after which it is given up.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self._address, self._line = address, connection(address, timeout)
        self._closed = False
        self._line.auto_open = 0  # what was closed stays so

    def parcels(self, name: str, ids: Tensor, takers: int = 1) -> list[dict[str, Any]]:
        """What each rank hands over of the prompt ``ids [T]``, int64; waits until it is read.

        Args:
            name: the same for all `takers` that ask for this prompt.

        Raises:
            ReaderError: it was not read, for what reason ever.
        """
        where = f"/read?{urlencode({'prompt': name, 'takers': takers})}"
        try:
            if not self._closed:
                self._line.connect()
            if self._closed:  # by now: `close` found nothing to shut
                raise ConnectionAbortedError
            self._line.request("POST", where, body=ids.contiguous().numpy().tobytes())
            answer = self._line.getresponse()
            said = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = "the request was given up" if self._closed else f"{type(error).__name__}: {error}"
            raise ReaderError(f"the reader at {self._address} did not answer ({why})") from error
        if not isinstance(said, dict) or (answer.status == 200 and not isinstance(said.get("parcels"), list)):
            raise ReaderError(f"what answers at {self._address} is no reader (it said {str(said)[:80]!r})")
        if answer.status != 200:
            raise ReaderError(f"the reader at {self._address} refused: {said.get('error')}")
        return said["parcels"]

    def close(self) -> None:
        """Give the prompt up, from any thread, whether it is read or not."""
        self._closed = True
        sock = self._line.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
            except OSError:
                pass  # it is closed already
        self._line.close()
