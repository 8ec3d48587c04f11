"""Which call each rank of a group is in: a log in memory that the ranks of one host share.

A rank that comes to a call writes a digest of it (its function, shapes, dtypes, flags and layout) into its own lines,
and compares its lines with those of the other ranks as far as these have come. So of two ranks that differ, the later
one sees it before it sends anything, and the earlier one while it waits, or at its next call. Nobody waits for a
comparison, and a call costs the host a few microseconds. No device takes part.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..errors import DisagreementError, PeerError
from .members import JobStore, Members

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LINES = 1024
"""Calls that a rank may be ahead of another before theirs can no longer be compared."""
BACK = 0x9E3779B97F4A7C15
"""What makes the digest of a backward pass of a call's digest, with the call's number."""
HEAD = 8
"""Numbers before a rank's lines: its calls so far; the rank plus 1 that has sent what nobody expects; the number plus 1
of the call in which ranks were found to differ; and room."""
GRACE = 2.0
"""Seconds in which a rank that is alive says which other call it is in, at most."""


class Entry(NamedTuple):
    """A call in the log: what is compared, its text, a hint for whoever reads the error; a digest of the text."""

    what: str
    text: str
    hint: str
    digest: int

    @classmethod
    def of(cls, what: str, text: str, hint: str = "") -> Entry:
        """An entry with its digest, which is the same in every process."""
        digest = hashlib.blake2b(f"{what}\n{text}".encode(), digest_size=8).digest()
        return cls(what, text, hint, int.from_bytes(digest, "little"))


class CallLog:
    """The log of one group, as one of its ranks sees it.

    Args:
        members: the ranks. store: where ranks that differ tell each other their calls.
        file: shared by all ranks, and open; the lock on its byte r is rank r's as long as that lives.
    """

    def __init__(self, members: Members, store: JobStore, file: int) -> None:
        self._members, self._store, self._file = members, store.of("calls"), file
        words = HEAD + LINES
        self._all = memoryview(mmap.mmap(file, 8 * words * members.size)).cast("Q")
        weakref.finalize(self, os.close, file)
        self._first = [r * words for r in range(members.size)]
        self._mine = self._first[members.rank]
        self._others = [r for r in range(members.size) if r != members.rank]
        self._compared = [0] * members.size
        self._entries: list[Entry | None] = [None] * LINES
        self._count = self._met = 0
        self._told = 0  # where this rank has raised that ranks differ, as in the head
        self.trouble: DisagreementError | PeerError | None = None
        """Why messages of this rank were given up (`lookout`): every later call raises it."""

    @classmethod
    def open(cls, members: Members, store: JobStore, tell: Callable[[str], list[str]]) -> CallLog | None:
        """The log of a group; None where its ranks are not on one host. Collective."""
        if members.size == 1 or fcntl is None or len(set(tell(socket.gethostname()))) > 1:
            return None
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        path = os.path.join(folder, f"ring_la-{store.name}-calls")
        file, name = -1, "none"
        with suppress(OSError):  # no room, or no permission: the job's store does it
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            size, seen = 8 * (HEAD + LINES) * members.size, os.fstat(file)
            if os.pwrite(file, bytes(size), 0) == size:
                fcntl.lockf(file, fcntl.LOCK_EX, 1, members.rank)  # before any rank can ask whether this one lives
                name = f"{seen.st_dev} {seen.st_ino}"
        names = tell(name)  # hosts of one name may be several machines
        with suppress(OSError):
            os.unlink(path)  # all have it open; nothing is left behind, however the ranks end
        if "none" not in names and len(set(names)) == 1:
            return cls(members, store, file)
        if file >= 0:
            os.close(file)
        return None

    def enter(self, entry: Entry) -> None:
        """This rank comes to a call.

        Raises:
            DisagreementError: another rank came to another call here, or in a call before. PeerError: one did so
            earlier, and messages are left from then.
        """
        if self.trouble is not None:
            raise self.trouble
        n, mine, log = self._count, self._mine, self._all
        self._entries[n % LINES] = entry
        log[mine + HEAD + n % LINES] = entry.digest
        self._count = log[mine] = n + 1
        self._compare()
        if log[mine + 1]:
            name = self._members.names([log[mine + 1] - 1])
            raise PeerError(f"this group is of no more use: {name} had sent messages when its ranks disagreed")

    def back(self) -> Entry | None:
        """What a rank enters that goes back through the call it is in now; None before the first call. The call's
        number is part of it: of two equal calls each has a backward pass of its own."""
        n, call = self._count, self._entries[(self._count - 1) % LINES]
        if call is None:
            return None
        text = f"backward of call {n}\n{call.text}"
        return Entry("the backward pass", text, call.hint, (call.digest + n * BACK) % 2**64)

    def meet(self, sent: bool = False) -> None:
        """Wait until every rank has come to this rank's call; returns at once if they have. `sent`: messages of the
        call are under way.

        Raises:
            DisagreementError: one has come to another call. RuntimeError: one does not come within the group's timeout,
            or has died.
        """
        if self._met == self._count:
            return
        n, start, pause = self._count, time.monotonic(), 0.0
        patience = self._members.timeout.total_seconds()
        while True:
            self._compare(sent)
            behind = [r for r in self._others if self._all[self._first[r]] < n]
            if not behind:
                self._met = n
                return
            waited = time.monotonic() - start
            dead = [r for r in behind if pause >= 1e-3 and self._is_dead(r)]
            if dead or waited > patience:
                why = (
                    f"{self._members.names(dead)} died" if dead else f"no call of {self._members.names(behind)} in time"
                )
                raise RuntimeError(why)
            time.sleep(pause)
            pause = min(waited / 20, 0.005)

    def _compare(self, sent: bool = False) -> None:
        """Compare this rank's lines with the others', from where they were compared last."""
        log, mine, n = self._all, self._mine, self._count
        for r in self._others:
            first, i = self._first[r], self._compared[r]
            theirs = log[first]
            if theirs <= i or n <= i:
                continue
            if n - i > LINES or theirs - i > LINES:
                i = max(n, theirs) - LINES
            while i < n and i < theirs:
                if log[first + HEAD + i % LINES] != log[mine + HEAD + i % LINES]:
                    self._compared = [max(c, i + 1) for c in self._compared]
                    if sent or i < n - 1:
                        self._spoil()
                    self._refuse(i)
                i += 1
            self._compared[r] = i

    def hopeless(self) -> Callable[[], DisagreementError | PeerError] | None:
        """What makes the error for messages of this rank that will not come; None: nothing says so. For another thread
        than the one that makes calls."""
        log, mine, n = self._all, self._mine, self._count
        differ, spoiled = log[mine + 2], log[mine + 1]
        if differ and differ <= n and (spoiled or differ != self._told):
            return lambda: self._difference(differ - 1)
        dead = [r for r in self._others if log[self._first[r]] < n and self._is_dead(r)]
        if not dead:
            return None
        who = f"rank {self._members.rank} of {self._members.size}"
        return lambda: PeerError(f"{who} waits for messages that do not come: {self._members.names(dead)} died")

    def give_up(self, error: DisagreementError | PeerError) -> None:
        """Make every later call of this rank raise `error`; the others learn that the group is of no more use."""
        self.trouble = error
        self._spoil()

    def _spoil(self) -> None:
        """Tell every rank that messages of this rank are under way which nobody expects."""
        self._members.spoil()
        for first in self._first:
            self._all[first + 1] = self._members.rank + 1

    def _refuse(self, i: int) -> None:
        """Raise, on every rank that comes here, what each of them called."""
        self._told = i + 1
        for first in self._first:
            self._all[first + 2] = i + 1
        raise self._difference(i)

    def _difference(self, i: int) -> DisagreementError:
        """What each rank called where they differ."""
        m, own = self._members, self._entries[i % LINES]
        assert own is not None
        self._store.set(f"{i}/{m.rank}", f"{own.what}\n{own.text}")
        told, deadline = {m.rank: (own.what, own.text)}, time.monotonic() + GRACE
        while len(told) < m.size and time.monotonic() < deadline:
            for r in (r for r in self._others if r not in told and self._store.check([f"{i}/{r}"])):
                what, _, text = self._store.get(f"{i}/{r}").decode().partition("\n")
                told[r] = what, text
            time.sleep(0.005)
        return DisagreementError(_message(told, m.size, own.hint))

    def _is_dead(self, rank: int) -> bool:
        """Whether a rank's process has ended: the system gives its lock away."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _message(told: dict[int, tuple[str, str]], size: int, hint: str) -> str:
    """What ranks disagree on: the calls themselves, or what differs in their arguments."""
    whats = {what for what, _ in told.values()}
    about = whats.pop() if len(whats) == 1 else "which call this is"
    values = [told[r][1] if r in told else "another call, not told in time" for r in range(size)]
    lines = "\n".join(f"  rank {r}: {v}" for r, v in enumerate(differences(values)))
    message = f"the ranks of this group disagree on {about}:\n{lines}"
    return f"{message}\n{hint}" if hint else message


def differences(values: list[str]) -> list[str]:
    """Of each value the lines that not all have; where some are refusals, their reasons alone."""
    if any(v.startswith("refused: ") for v in values):
        return [v if v.startswith("refused: ") else "nothing refused" for v in values]
    told = [v.splitlines() for v in values]
    common = set(told[0]).intersection(*told)
    return [", ".join(line for line in own if line not in common) for own in told]
