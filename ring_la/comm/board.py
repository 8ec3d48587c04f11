"""Memory that the ranks of one host share: how far each has come in its calls, and what all ranks must know.

A file without a name once all have it open, so that nothing is left behind, however the ranks end. In words of 64 bits:
a head, a word for each rank of the group that is gone, and a row for each rank of the host, its calls so far and the
digests of the last `LINES` of them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LINES = 1024
"""Calls that a rank may be ahead of another before theirs can no longer be compared."""
NEVER = 2**64 - 1
"""Calls of a host that nobody waits for."""
SPOILED, ELSEWHERE, AWAITED, LOST, FOUND, DIFFER, ROOM = 0, 1, 2, 3, 4, 5, 8
"""The head: the rank plus 1 that has sent what nobody expects; calls that every rank of the other hosts has come to;
when a rank last waited for them, in ns; whether a rank of the others is gone; how many calls were found to differ; and
the numbers plus 1 of the last `ROOM` of these."""
HEAD = DIFFER + ROOM
ROW = 2
"""Before a row's lines: the calls that the rank has come to; those that it has compared with the ranks of its host."""


class Board:
    """The memory of one host, as one of its ranks sees it.

    Args:
        file: shared by the host's ranks, and open; the lock on its byte r is rank r's as long as that lives.
        rank: this one. hosts: of each host its ranks, in the order of their first ones.

    Attributes:
        words: the memory. here: the ranks of this host. away: all others.
        rows: of each rank of this host, where its row begins.
    """

    def __init__(self, file: int, rank: int, hosts: Sequence[Sequence[int]]) -> None:
        self.rank, self.hosts = rank, hosts
        self.here = next(ranks for ranks in hosts if rank in ranks)
        self.away = [r for ranks in hosts if rank not in ranks for r in ranks]
        self.words = memoryview(mmap.mmap(file, 0)).cast("Q")
        size = len(self.here) + len(self.away)
        self.rows = {r: HEAD + size + n * (ROW + LINES) for n, r in enumerate(self.here)}
        if not self.away:
            self.words[ELSEWHERE] = NEVER
        self._file = file
        weakref.finalize(self, os.close, file)

    @classmethod
    def open(cls, rank: int, size: int, name: str, tell: Callable[[str], list[str]]) -> Board | None:
        """The memory of a group's ranks on this host; None where one of them has none. Collective."""
        host = socket.gethostname()
        neighbours = tell(host).count(host)
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        own = hashlib.blake2b(host.encode(), digest_size=6).hexdigest()
        path = os.path.join(folder, f"ring_la-{name}-{own}-calls")
        file, told = -1, "none"
        with suppress(OSError):  # no room, or no permission
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            need, seen = 8 * (HEAD + size + neighbours * (ROW + LINES)), os.fstat(file)
            if os.pwrite(file, bytes(need), 0) == need:
                fcntl.lockf(file, fcntl.LOCK_EX, 1, rank)  # before any rank can ask whether this one lives
                told = f"{host} {_machine()} {seen.st_dev} {seen.st_ino}"  # hosts of one name may be several machines
        said = tell(told)
        with suppress(OSError):
            os.unlink(path)
        if "none" in said:
            if file >= 0:
                os.close(file)
            return None
        return cls(file, rank, [[r for r, one in enumerate(said) if one == host] for host in dict.fromkeys(said)])

    def is_dead(self, rank: int) -> bool:
        """Whether the process of a rank of this host has ended: the system gives its lock away."""
        if rank == self.rank:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def count(self, rank: int) -> int:
        """Calls that a rank of this host has come to."""
        return self.words[self.rows[rank]]

    def settled(self) -> int:
        """Calls that all ranks of this host have come to and compared."""
        return min(self.words[row + 1] for row in self.rows.values())

    def lines(self, rank: int, first: int, end: int) -> list[int]:
        """The digests of calls `first` … `end` − 1 of a rank of this host, at most `LINES`."""
        row = self.rows[rank] + ROW
        return [self.words[row + i % LINES] for i in range(first, end)]

    def gone(self) -> dict[int, int]:
        """Ranks of other hosts, and those of this one that `lose` was told of, that have ended, each with its calls."""
        if not self.words[LOST]:
            return {}
        words = self.words[HEAD : HEAD + len(self.here) + len(self.away)].tolist()
        return {r: word - 1 for r, word in enumerate(words) if word}

    def lose(self, rank: int, calls: int) -> None:
        """A rank has ended after so many calls."""
        if not self.words[HEAD + rank]:
            self.words[HEAD + rank] = calls + 1
            self.words[LOST] = 1

    def differences(self) -> list[int]:
        """The last calls that were found to differ: their numbers plus 1, in order."""
        return sorted(word for word in self.words[DIFFER : DIFFER + ROOM].tolist() if word)

    def differ(self, call: int) -> None:
        """Calls of a number (plus 1) were found to differ."""
        if call not in self.differences():
            found = self.words[FOUND]
            self.words[DIFFER + found % ROOM] = call
            self.words[FOUND] = found + 1


def _machine() -> str:
    """What no other machine has, where the system tells it."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""
