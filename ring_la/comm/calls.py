"""Which call each rank of a group is in: a log in memory that the ranks of one host share.

A rank that comes to a call writes a digest of it (its function, shapes, dtypes, flags and layout) into its own lines,
and compares its lines with those of the other ranks of its host as far as these have come. So of two ranks that differ,
the later one sees it before it sends anything, and the earlier one while it waits, or at its next call. What other
hosts have come to is compared beside the calls (`carrier`). Nobody waits for a comparison, but on CPUs between hosts,
and a call costs the host a few microseconds. No device takes part.
"""

from __future__ import annotations

import functools
import hashlib
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from ..errors import DisagreementError, PeerError
from .board import AWAITED, ELSEWHERE, FOUND, LINES, ROW, SPOILED, Board, fcntl
from .carrier import Carrier
from .members import JobStore, Members

BACK = 0x9E3779B97F4A7C15
"""What makes the digest of a backward pass of a call's digest, with the call's number."""
GRACE = 2.0
"""Seconds in which a rank that is alive says which other call it is in, at most."""


class Entry(NamedTuple):
    """A call in the log: what is compared, its text, a hint for whoever reads the error; a digest of the text, or of
    what stands for it."""

    what: str
    text: str
    hint: str
    digest: int

    @classmethod
    def of(cls, what: str, text: str, hint: str = "", alike: str = "") -> Entry:
        """An entry with its digest, which is the same in every process. `alike`: see `Agreement.agree`."""
        digest = hashlib.blake2b(f"{what}\n{alike or text}".encode(), digest_size=8).digest()
        return cls(what, text, hint, int.from_bytes(digest, "little"))


class Behind(NamedTuple):
    """A rank's calls so far, and those of ranks that have come to fewer: of its host, and the fewest of others."""

    calls: int
    ranks: tuple[tuple[int, int], ...]
    elsewhere: int


class CallLog:
    """The log of one group, as one of its ranks sees it.

    Args:
        members: the ranks. store: where ranks that differ tell each other their calls. board: the memory of this host.

    Attributes:
        one_host: whether all ranks are on one. patience: seconds that a rank may be late.
    """

    def __init__(self, members: Members, store: JobStore, board: Board) -> None:
        self._members, self._store, self._board = members, store.of("calls"), board
        self._all, self._first = board.words, board.rows
        self.patience = members.timeout.total_seconds()
        self._mine, self.one_host = board.rows[members.rank], not board.away
        self._others = [r for r in board.here if r != members.rank]
        self._compared = dict.fromkeys(self._others, 0)
        self._entries: list[Entry | None] = [None] * LINES
        self._count = self._met = 0
        self._told = 0  # the last call, plus 1, in which this rank has raised that ranks differ
        self._found = 0  # of the differences on the board, how many this rank has nothing more to do with
        self.trouble: DisagreementError | PeerError | None = None
        """Why messages of this rank were given up (`lookout`): every later call raises it."""

    @classmethod
    def open(cls, members: Members, store: JobStore, tell: Callable[[str], list[str]]) -> CallLog | None:
        """The log of a group; None where ranks of one host share no memory, or hosts do not reach each other.
        Collective."""
        if members.size == 1 or fcntl is None:
            return None
        board = Board.open(members.rank, members.size, str(store.name), tell)
        if board is None:
            return None
        log = cls(members, store, board)
        if board.away:
            carrier = Carrier.open(board, store, tell)
            if carrier is None:
                return None
            weakref.finalize(log, carrier.leave)
        return log

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
        log[mine + ROW + n % LINES] = entry.digest
        self._count = log[mine] = n + 1
        self._compare()
        log[mine + 1] = n + 1
        if log[SPOILED]:
            name = self._members.names([log[SPOILED] - 1])
            raise PeerError(f"this group is of no more use: {name} had sent messages when its ranks disagreed")

    def back(self) -> Entry | None:
        """What a rank enters that goes back through the call it is in now; None before the first call. The call's
        number is part of it: of two equal calls each has a backward pass of its own."""
        n, call = self._count, self._entries[(self._count - 1) % LINES]
        if call is None:
            return None
        text = f"backward of call {n}\n{call.text}"
        return Entry("the backward pass", text, call.hint, (call.digest + n * BACK) % 2**64)

    def word(self) -> int:
        """31 bits of the digest of the last call that this rank has come to, odd; 1 before the first."""
        call = self._entries[(self._count - 1) % LINES]
        return 1 if call is None else call.digest & 0x7FFFFFFE | 1

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
        while True:
            behind = [r for r in self._others if self._all[self._first[r]] < n]
            elsewhere = self._all[ELSEWHERE] < n and (pause < 1e-3 or not self._is_dead(self._board.here[0]))
            dead = [r for r in behind if pause >= 1e-3 and self._is_dead(r)] + self._gone(n)  # told before `elsewhere`
            self._compare(sent)  # now, with the lines of those who are not behind
            if not behind and not dead and not elsewhere:
                self._met = n
                return
            waited = time.monotonic() - start
            if dead or waited > self.patience:
                late = self._members.names(behind) if behind else "ranks of other hosts"
                raise RuntimeError(f"{self._members.names(dead)} died" if dead else f"no call of {late} in time")
            if elsewhere:
                self._all[AWAITED] = time.monotonic_ns()
            time.sleep(pause)
            pause = min(waited / 20, 0.005)

    def _gone(self, n: int) -> list[int]:
        """Ranks of other hosts that have ended before they came to `n` calls."""
        gone = self._board.gone()
        return [r for r in self._board.away if gone.get(r, n) < n] if gone else []

    def _compare(self, sent: bool = False) -> None:
        """Compare this rank's lines with those of the ranks here, from where they were compared last, and look whether
        another rank, here or elsewhere, has found calls that differ."""
        log, mine, n = self._all, self._mine, self._count
        if log[FOUND] != self._found:
            self._refuse_found(sent)
        for r in self._others:
            first, i = self._first[r], self._compared[r]
            theirs = log[first]
            if theirs <= i or n <= i:
                continue
            if n - i > LINES or theirs - i > LINES:
                i = max(n, theirs) - LINES
            while i < n and i < theirs:
                if log[first + ROW + i % LINES] != log[mine + ROW + i % LINES]:
                    self._refuse(i, sent)
                i += 1
            self._compared[r] = i

    def _refuse_found(self, sent: bool) -> None:
        """Raise what others have found of the calls that this rank has come to."""
        found, n = self._all[FOUND], self._count
        ahead = [call for call in self._board.differences() if call > self._told]
        if not ahead:
            self._found = found
        elif ahead[0] <= n:
            self._refuse(ahead[0] - 1, sent)

    def hopeless(self) -> Callable[[], DisagreementError | PeerError] | None:
        """What makes the error for messages of this rank that will not come; None: nothing says so. For another thread
        than the one that makes calls."""
        n, told, spoiled = self._count, self._told, self._all[SPOILED]
        found = [call for call in self._board.differences() if told < call <= n] or [told] * bool(spoiled and told)
        if found:
            return lambda: self._difference(found[0] - 1)
        dead = [r for r in self._others if self._all[self._first[r]] < n and self._is_dead(r)] + self._gone(n)
        return functools.partial(self._without, dead) if dead else None

    def died(self) -> PeerError | None:
        """What a rank raises that has waited for its device for a while though a rank of its host has died, whatever
        calls that one had come to: it may have been ahead. None: they live."""
        dead = [r for r in self._others if self._is_dead(r)]
        return self._without(dead) if dead else None

    def _without(self, dead: list[int]) -> PeerError:
        who = f"rank {self._members.rank} of {self._members.size}"
        return PeerError(f"{who} waits for messages that do not come: {self._members.names(dead)} died")

    def behind(self) -> Behind | None:
        """Who has not come to this rank's last call; None: nobody. For another thread than the one that makes calls."""
        n = self._count
        here = tuple((r, self._all[self._first[r]]) for r in self._others)
        late, elsewhere = tuple(one for one in here if one[1] < n), self._all[ELSEWHERE]
        return Behind(n, late, elsewhere) if late or elsewhere < n else None

    def ask_elsewhere(self) -> None:
        """Have the other hosts say what their ranks have come to."""
        if self._board.away:
            self._all[AWAITED] = time.monotonic_ns()

    def too_late(self, behind: Behind) -> PeerError:
        """What a rank raises that has waited for them for too long."""
        m = self._members
        late = m.names([r for r, _ in behind.ranks]) if behind.ranks else "ranks of other hosts"
        who = f"rank {m.rank} of {m.size}"
        return PeerError(f"{who} waits for messages that do not come: no call of {late} in {self.patience:.0f} s")

    def give_up(self, error: DisagreementError | PeerError) -> None:
        """Make every later call of this rank raise `error`; the others learn that the group is of no more use."""
        self.trouble = error
        self._spoil()

    def _spoil(self) -> None:
        """Tell every rank that messages of this rank are under way which nobody expects."""
        self._members.spoil()
        self._all[SPOILED] = self._members.rank + 1

    def _refuse(self, i: int, sent: bool) -> None:
        """Raise, on every rank that comes here, what each of them called. `sent`: messages of the last call are under
        way."""
        if sent or i < self._count - 1:
            self._spoil()
        self._compared = {r: max(c, i + 1) for r, c in self._compared.items()}
        self._told = i + 1
        self._board.differ(i + 1)
        raise self._difference(i)

    def _difference(self, i: int) -> DisagreementError:
        """What each rank called where they differ."""
        m, own = self._members, self._entries[i % LINES]
        if own is None or self._count - i > LINES:  # found where this rank was far ahead
            own = Entry("which call this is", f"one of more than {LINES} calls ago", "", 0)
        self._store.set(f"{i}/{m.rank}", f"{own.what}\n{own.text}")
        told, deadline = {m.rank: (own.what, own.text)}, time.monotonic() + GRACE
        while len(told) < m.size and time.monotonic() < deadline:
            for r in (r for r in range(m.size) if r not in told and self._store.check([f"{i}/{r}"])):
                what, _, text = self._store.get(f"{i}/{r}").decode().partition("\n")
                told[r] = what, text
            time.sleep(0.005)
        return DisagreementError(_message(told, m.size, own.hint))

    def _is_dead(self, rank: int) -> bool:
        """Whether the process of a rank of this host has ended."""
        return self._board.is_dead(rank)


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
