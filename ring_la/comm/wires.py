"""Connections between the first ranks of hosts: to the first host from each other. Words of 64 bits, no pickles."""

from __future__ import annotations

import socket
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

from .members import JobStore

REACH = 2.0
"""Seconds in which a host answers at one of its addresses."""


class Wire:
    """One connection. What is sent is the state of a host: where the last has not left yet, a new one waits its turn.

    Attributes:
        rank: the first rank of the host at the other end. socket: the connection.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):  # a machine that is gone is found in 25 s
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setblocking(False)
        self.socket, self.rank = connection, rank
        self._out, self._in = b"", b""

    def free(self) -> bool:
        """Whether what was sent before has left."""
        with suppress(BlockingIOError):
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        return not self._out

    def send(self, words: Sequence[int]) -> None:
        """Send these words, once `free`."""
        self._out = array("Q", [len(words), *words]).tobytes()
        self.free()

    def receive(self) -> list[list[int]]:
        """What has come. Raises `EOFError` where nothing has, and the other end is closed."""
        ended = False
        try:
            while part := self.socket.recv(1 << 18):
                self._in += part
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        messages = []
        while len(self._in) >= 8 and len(self._in) >= (need := 8 + 8 * int.from_bytes(self._in[:8], sys.byteorder)):
            messages.append(array("Q", self._in[8:need]).tolist())
            self._in = self._in[need:]
        if ended and not messages:  # what was said last counts
            raise EOFError
        return messages


def connect(rank: int, firsts: Sequence[int], store: JobStore, tell: Callable[[str], list[str]]) -> list[Wire] | None:
    """The connections of a rank: of the first of `firsts` one to each other, of these one to it, of all other ranks
    none. None, on all ranks, where one does not reach the other. Collective."""
    token = array("Q", [store.name]).tobytes()
    found: dict[int, socket.socket] = {}
    done = threading.Event()
    if rank == firsts[0]:
        with suppress(OSError):
            with socket.create_server(("", 0), backlog=len(firsts)) as server:
                listening = (server, token, firsts[1:], found, done)
                accepting = threading.Thread(target=_accept, args=listening, name="ring_la hosts", daemon=True)
                accepting.start()
                tell(" ".join([str(server.getsockname()[1]), *_addresses(store.host)]))
                reached = tell("yes")
                done.set()
                accepting.join()
            return _wires(found, reached)
    port, *addresses = tell("")[firsts[0]].split() or ["0"]
    if rank in firsts[1:]:
        for address in addresses:
            connection = _reach(address, int(port), token, rank)
            if connection is not None:
                found[firsts[0]] = connection
                break
    return _wires(found, tell("yes" if found or rank not in firsts else "no"))


def _wires(found: dict[int, socket.socket], reached: Sequence[str]) -> list[Wire] | None:
    if "no" not in reached:
        return [Wire(connection, rank) for rank, connection in found.items()]
    for connection in found.values():
        connection.close()
    return None


def _accept(
    server: socket.socket, token: bytes, ranks: Sequence[int], found: dict[int, socket.socket], done: threading.Event
) -> None:
    """Take the connection of each of `ranks`, until all ranks have tried."""
    server.settimeout(0.05)
    while not done.is_set() and len(found) < len(ranks):
        with suppress(OSError):
            connection, _ = server.accept()
            connection.settimeout(REACH)
            said = connection.recv(16, socket.MSG_WAITALL)
            who = int.from_bytes(said[8:], sys.byteorder)
            if said[:8] != token or who not in ranks:
                connection.close()
                continue
            connection.sendall(token)
            found[who] = connection


def _reach(address: str, port: int, token: bytes, rank: int) -> socket.socket | None:
    """A connection to the host at an address, if it is the one that is meant."""
    with suppress(OSError):
        connection = socket.create_connection((address, port), REACH)
        with suppress(OSError):
            connection.sendall(token + array("Q", [rank]).tobytes())
            if connection.recv(8, socket.MSG_WAITALL) == token:
                return connection
        connection.close()
    return None


def _addresses(host: str) -> list[str]:
    """Where others may reach this host: how it reaches the job's store, or as its own name has it; last, where all
    hosts are one machine."""
    found = []
    for target in (host, "192.0.2.1"):  # an address of nobody: which of this host's leads outward. Nothing is sent
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    loops = [a for a in found if a.startswith("127.")]
    return list(dict.fromkeys([*(a for a in found if a not in loops), "127.0.0.1"]))
