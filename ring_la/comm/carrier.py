"""Between hosts, beside the calls: a thread of each host's first rank carries how far its ranks have come.

Each sends the first host what is new, every `PAUSE` seconds: the digests of the calls that its furthest rank has come
to, how many of them all its ranks have, and what its ranks know (calls that differ, messages that nobody expects, ranks
that have ended). The first host holds the digests to those that came first, and sends back what all hosts know. So
there are as many connections as other hosts, and a host gets a few words however many there are.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .board import AWAITED, DIFFER, ELSEWHERE, LINES, NEVER, ROOM, SPOILED, Board
from .members import JobStore
from .wires import Wire, connect

PAUSE = 0.02
"""Seconds between two looks at the board."""
SOON = 0.001
"""The same while ranks wait for other hosts, and for `LINGER` seconds after."""
LINGER = 0.05
LIVES = 0.5
"""Seconds between two looks whether the ranks of this host live."""

log_of_events = logging.getLogger("ring_la")


class Carrier:
    """The thread of one host's first rank.

    Args:
        board: the memory of this host. wires: to the other hosts, or to the first one. compares: this is the first one.
    """

    def __init__(self, board: Board, wires: list[Wire], compares: bool) -> None:
        self._board, self._compares = board, compares
        self._low = {wire: 0 for wire in wires}  # calls that all ranks behind it have come to
        self._wires, self._told = wires, dict[Wire, list[int]]()  # the state that was sent last
        self._first = {wire: 0 for wire in wires}  # the line that is sent next
        self._held = {wire: 0 for wire in wires}  # the lines that were held to the reference
        self._reference = Reference()
        self._looked, self._leaving = 0.0, False
        self._bell, self._ear = socket.socketpair()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, board: Board, store: JobStore, tell: Callable[[str], list[str]]) -> Carrier | None:
        """What carries for this rank, if it is its host's first one; None, on all ranks, where a host does not reach
        the first one. Collective."""
        firsts = [ranks[0] for ranks in board.hosts]
        wires = connect(board.rank, firsts, store, tell)
        if wires is None:
            return None
        carrier = cls(board, wires, board.rank == firsts[0])
        if board.rank in firsts:
            carrier._thread = threading.Thread(target=carrier._run, name="ring_la hosts", daemon=True)
            carrier._thread.start()
        return carrier

    def leave(self) -> None:
        """End the thread: the other hosts wait for this one's calls no longer."""
        self._leaving = True
        if self._thread is None:
            self._bell.close()
            self._ear.close()
            return
        with suppress(OSError):
            self._bell.send(b"!")
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._ear, selectors.EVENT_READ)
                for wire in self._low:
                    selector.register(wire.socket, selectors.EVENT_READ, wire)
                while self._low and not self._leaving:
                    self._step([key.data for key, _ in selector.select(self._pause()) if key.data], selector)
                self._bury()  # whoever waits for this host must hear of its dead before it waits no longer
                for wire in list(self._low):
                    self._tell(wire, left=True)
        except Exception as error:
            log_of_events.warning("calls are no longer compared with those of other hosts: %s", error)
        finally:
            self._board.words[ELSEWHERE] = NEVER  # nobody here waits for the others' calls
            for wire in self._wires:
                wire.socket.close()
            self._bell.close()
            self._ear.close()

    def _pause(self) -> float:
        waited = self._board.words[AWAITED]
        return SOON if waited and time.monotonic_ns() - waited < LINGER * 1e9 else PAUSE

    def _step(self, ready: list[Wire], selector: selectors.BaseSelector) -> None:
        """Take what has come, and send what is new."""
        for wire in ready:
            try:
                for message in wire.receive():
                    self._take(wire, message)
            except (OSError, EOFError):
                selector.unregister(wire.socket)
                calls = self._low.pop(wire)
                if calls != NEVER:  # it did not say that it leaves
                    self._board.lose(wire.rank, calls)
        if time.monotonic() - self._looked > LIVES:
            self._bury()
        if self._compares:
            first, lines = self._lines(self._reference.own)
            self._hold(first, lines)
            self._reference.own = first + len(lines)
        come = min(self._low.values(), default=NEVER)
        compared = self._reference.own if self._compares and self._low else NEVER
        self._board.words[ELSEWHERE] = min(come, compared)
        for wire in list(self._low):
            with suppress(OSError):  # what is at the other end has ended: it is seen when it is read
                self._tell(wire)

    def _bury(self) -> None:
        """Put down which ranks of this host have ended."""
        self._looked = time.monotonic()
        for rank in self._board.here:
            if self._board.is_dead(rank):
                self._board.lose(rank, self._board.count(rank))

    def _lines(self, first: int) -> tuple[int, list[int]]:
        """The digests of the furthest rank of this host, from line `first` or the last that are kept."""
        furthest = max(self._board.here, key=self._board.count)
        end = self._board.count(furthest)
        first = max(first, end - LINES // 2)  # the rank goes on meanwhile
        return first, self._board.lines(furthest, first, end)

    def _hold(self, first: int, lines: list[int]) -> None:
        other = self._reference.differs(first, lines)
        if other is not None:
            self._board.differ(other + 1)

    def _tell(self, wire: Wire, left: bool = False) -> None:
        """Send the state of all hosts but the one at the other end, if it is new."""
        if left:
            wire.socket.settimeout(0.2)
        if not wire.free():
            return
        board, low = self._board, NEVER if left else self._calls(wire)
        gone = [word for pair in board.gone().items() for word in pair]
        known = board.words[DIFFER : DIFFER + ROOM].tolist()
        state = [low, board.words[SPOILED], *known, len(gone), *gone]
        first, lines = (0, []) if self._compares else self._lines(self._first[wire])
        if self._told.get(wire) != state or lines:
            wire.send([*state, first, *lines])
            self._told[wire], self._first[wire] = state, first + len(lines)

    def _calls(self, wire: Wire) -> int:
        """Calls that all ranks but those at the other end of a wire have come to, and that are compared with theirs."""
        calls = [self._board.settled(), *(low for other, low in self._low.items() if other is not wire)]
        return min([*calls, self._held[wire]] if self._compares else calls)

    def _take(self, wire: Wire, message: list[int]) -> None:
        """Put down what has come."""
        board, known = self._board, 2 + ROOM
        self._low[wire] = message[0]
        if message[1] and not board.words[SPOILED]:
            board.words[SPOILED] = message[1]
        for call in sorted(call for call in message[2:known] if call):
            board.differ(call)
        end = known + 1 + message[known]
        gone = message[known + 1 : end]
        for rank, calls in zip(gone[::2], gone[1::2]):
            board.lose(rank, calls)
        self._hold(message[end], message[end + 1 :])
        self._held[wire] = message[end] + len(message[end + 1 :])


class Reference:
    """The calls of a group by whoever came to them first, the last `LINES` of them.

    Attributes:
        own: the line of this host that is held to it next.
    """

    def __init__(self) -> None:
        self.own = 0
        self._lines = [(-1, 0)] * LINES

    def differs(self, first: int, lines: list[int]) -> int | None:
        """The first of a host's lines that is another than the one that came first; None: none is."""
        for i, line in enumerate(lines, first):
            number, kept = self._lines[i % LINES]
            if number < i:
                self._lines[i % LINES] = i, line
            elif number == i and kept != line:
                return i
        return None
