"""Prompts that are being read, piece by piece, and what is kept of them for those that begin alike. On rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .completion import Completion
from .disk import Stored
from .pace import Pace
from .prefixes import Move, Prefixes, size_since
from .ranks import What, Word
from .states import States

LOG = logging.getLogger(__name__)
OLDEST = 4
"""Of so many pieces one is of the prompt that came first, however long it is."""


@dataclass
class Reading:
    """A prompt that is being read.

    Attributes:
        at: tokens that are read. key: the state that is what the model remembers of them; 0: none yet.
        stops: where a state is kept, the prompt's end last; None: it is not begun.
        kept, length: what is kept of its beginning, and how many tokens that is; 0: nothing.
    """

    job: Completion
    at: int = 0
    stops: list[int] | None = None
    key: int = 0
    kept: int = 0
    length: int = 0

    @property
    def left(self) -> int:
        """Tokens that are not read."""
        return len(self.job.request.ids) - self.at

    @property
    def state(self) -> int:
        """The number of what is remembered of the tokens that are read; 0: nothing."""
        return self.key or self.kept


class Prompts:
    """Prompts under way, as they came.

    Args:
        states: what this rank remembers of them. prefixes: which of it is kept.
        piece: the most tokens that are read at once; None: any number. pace: how many beside others.
        say: has all ranks do something, and returns the error they all have.
    """

    def __init__(
        self,
        states: States,
        prefixes: Prefixes,
        piece: int | None,
        pace: Pace,
        say: Callable[[Word], Exception | None],
    ) -> None:
        self._states, self._prefixes, self._piece, self._pace, self._say = states, prefixes, piece, pace, say
        self._readings: list[Reading] = []
        self._read_as: dict[int, tuple[tuple[int, int], ...]] = {}  # the pieces of what is kept
        self._pieces = 0  # that were read while other prompts waited for theirs
        self._last_key = 0

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def jobs(self) -> list[Completion]:
        """Whose prompts they are."""
        return [reading.job for reading in self._readings]

    def add(self, job: Completion) -> None:
        """A prompt more, of which nothing is read yet."""
        self._readings.append(Reading(job))

    def clear(self) -> None:
        """No prompts, whatever was read of them."""
        self._readings = []

    def let_go(self) -> None:
        """Forget those that nobody waits for any more."""
        for reading in [reading for reading in self._readings if reading.job.cancelled]:
            self.end(reading)

    def end(self, reading: Reading) -> None:
        """Nothing more is read of the prompt; its state goes."""
        self._readings.remove(reading)
        if reading.key:
            self._say(Word(What.DROP, reading.key))

    def next(self) -> Reading:
        """The prompt of which a piece is read now."""
        if len(self._readings) > 1:
            self._pieces += 1
        oldest = self._pieces % OLDEST == 0
        return self._readings[0] if oldest else min(self._readings, key=lambda reading: reading.left)

    def read(self, reading: Reading, beside: bool) -> Exception | None:
        """Read a piece of a prompt, `beside` sequences that are decoded; the error it failed with."""
        job, ids = reading.job, reading.job.request.ids
        if reading.stops is None:
            self._begin(reading)
        if not reading.left:
            return None
        end, start = self._piece_end(reading, beside), time.monotonic()
        self._last_key += 1
        key = self._last_key
        error = self._say(Word(What.READ, key, reading.state, ids=torch.tensor(ids[reading.at : end], device="cpu")))
        if error is not None:
            return error
        job.trail.pieces.append((reading.at, end))
        if beside:
            self._pace.read(end - reading.at, start, end < len(ids))
        if reading.key:
            self._say(Word(What.DROP, reading.key))
        reading.at, reading.key = end, key
        if end in reading.stops or end % (self._piece or end) == 0:
            self._keep(reading)
        return None

    def _begin(self, reading: Reading) -> None:
        """Find what is kept of the prompt's beginning, and where to keep more."""
        job, ids = reading.job, reading.job.request.ids
        reading.kept, job.reused = self._prefixes.longest(ids)
        if reading.kept and not self._prefixes.ready(reading.kept):
            self._move(self._prefixes.raised(reading.kept))
            if not self._prefixes.ready(reading.kept):
                reading.kept = job.reused = 0
        reading.at = reading.length = job.reused
        job.trail.before = self._read_as.get(reading.kept, ())
        reading.stops = self._prefixes.stops(ids, job.reused)

    def _piece_end(self, reading: Reading, beside: bool) -> int:
        """Where the next piece ends: a short one, if there are others whose tokens it holds up."""
        end = next(stop for stop in reading.stops if stop > reading.at)
        if self._piece is not None:
            end = min(end, (reading.at // self._piece + 1) * self._piece)
            if beside:
                end = min(end, reading.at + self._pace.tokens)
        return end

    def _keep(self, reading: Reading) -> None:
        """Keep what is read so far for prompts that begin alike, where there is memory."""
        if not self._prefixes.budgets[0]:
            return
        if not self._prefixes.ready(reading.kept):  # it has left, for another prompt's
            reading.kept = reading.length = 0
        size = size_since(self._states.before(reading.key), reading.length)
        moves = self._prefixes.put(reading.job.request.ids[: reading.at], reading.key, size, reading.kept)
        if moves is None:
            return
        self._move(moves)
        error = self._say(Word(What.KEEP, reading.key, reading.kept, reading.at))
        if error is None:
            reading.kept, reading.length = reading.job.trail.kept = reading.key, reading.at
            self._read_as[reading.key] = (*reading.job.trail.before, *reading.job.trail.pieces)
        else:
            LOG.warning("a state is not kept: %s", error)
            self._move(self._prefixes.remove(reading.key))  # from ranks that could

    def find(self) -> None:
        """Know what an earlier server left on disk; what there is no room for is removed."""
        disk = self._states.disk
        for stored in disk.found(self._states.home) if disk is not None else ():
            self._last_key += 1
            name, parent = bytes.fromhex(stored.name), bytes.fromhex(stored.parent)
            if not self._prefixes.add(name, self._last_key, stored.size, stored.length, parent):
                disk.remove(stored.name)

    def store(self) -> None:
        """Bring what is kept to disk, as far as there is room and time: the server is about to end. What does not get
        there is told to the log."""
        moves = self._prefixes.lowered()
        left = len(moves)
        try:
            for move in moves:
                self._move([move])
                left -= 1
        finally:
            if left:
                LOG.warning("%d of %d kept states are not on disk when the server ends", left, len(moves))

    def _move(self, moves: Sequence[Move]) -> None:
        """Have all ranks move what they keep. What cannot be moved is forgotten, and what goes on from it."""
        for move in moves:
            if move.to is not None and move.key not in self._prefixes:  # forgotten since, with the one before it
                self._remove(move)
                continue
            error = self._say(_word(move)) or self._note(move)
            if error is not None:
                LOG.warning("a state is kept no longer: %s", error)
                more = self._prefixes.remove(move.key)
                self._remove(move)
                self._move(more)

    def _note(self, move: Move) -> Exception | None:
        """What rank 0 alone does, once all have moved; the error it had."""
        if move.to is None:
            self._read_as.pop(move.key, None)
        if move.to == 2:
            parent = "" if move.entry.parent is None else move.entry.parent.hex()
            try:
                self._states.disk.publish(Stored(move.name.hex(), parent, move.entry.length, move.entry.size))
            except OSError as error:
                return error
        else:
            self._remove(move)
        return None

    def _remove(self, move: Move) -> None:
        """What moved is on disk no longer, if it was there or half came there."""
        if 2 in (move.source, move.to):
            self._states.disk.remove(move.name.hex())


def _word(move: Move) -> Word:
    if move.to is None:
        return Word(What.FORGET, move.key)
    name = torch.frombuffer(bytearray(move.name), dtype=torch.int64)
    return Word(What.MOVE, move.key, move.to, ids=torch.cat([name, torch.tensor([move.before], device="cpu")]))
