"""Requests in, tokens out: prompts read by all ranks, piece by piece, decoded as one batch.

    engine = Engine(model, text, cp)
    engine.submit(job)          # rank 0, from any thread; job.emit hears of its tokens
    engine.run()                # every rank, until engine.stop(): rank 0 decides, the others follow

Rank 0 goes round and round: a piece of a prompt, then tokens of the sequences of the batch for about as long. So a long
prompt takes half of others' speed and holds them up by one piece at a time, which is short while there are others; who
goes away is noticed between two pieces or tokens. Of several prompts the one with the fewest tokens left is read on,
now and then the one that came first.

Where keys stay on the rank that read them all ranks take each step together; rank 0 says of which tokens. A model whose
states are the same on all ranks is decoded by rank 0 alone.

An error in a request fails that request, where it is the same on all ranks; any other ends the server on all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..context import ContextParallel
from ..errors import ArgumentError, PeerError
from .batch import NOBODY, Row
from .completion import Completion, Failed, Request
from .model import Served
from .prefixes import Prefixes, size_since
from .ranks import DECODING as OF_THE_BATCH
from .ranks import PAUSE, Ranks, What, Word
from .states import FATAL, States
from .text import Stream, Text
from .waiting import Stopping, Waiting

LOG = logging.getLogger(__name__)
DECODING = 1.0
"""Seconds of decoding for each second of reading, where both are wanted."""
STEPS = 4
"""Tokens of each sequence, at least, between a piece and the next where the prompt goes on."""
HOLDUP = 0.25
"""Seconds that others' tokens are held up by a piece, about."""
OLDEST = 4
"""Of so many pieces one is of the prompt that came first, however long it is."""
FIRST = 512
"""Tokens a rank reads beside others before it is known how long that takes, and the least."""


class Overdue(BaseException):
    """Raised into a piece by who stops the engine, when requests under way have had their time."""


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


class Engine:
    """A model that answers requests. Collective: every rank makes one, then calls `run`.

    Args:
        model: what reads and decodes. text: its vocabulary.
        cp: the ranks a prompt is split over; None: this process alone.
        max_tokens: the most tokens of a prompt and its completion together; None: the model's own limit.
        room: the tokens there is memory for, of all sequences under way; None: any.
        piece: the most tokens of a prompt that are read at once; None: any number.
        batch: the most sequences read and decoded side by side (one, where the model's states cannot be joined).
        waiting: the most requests that wait.
        keep: bytes of states kept for prompts that begin alike, on each rank; 0: none.
        patience: seconds that requests under way get to end after `stop`.
    """

    def __init__(
        self,
        model: Served,
        text: Text,
        cp: ContextParallel | None = None,
        *,
        max_tokens: int | None = None,
        room: int | None = None,
        piece: int | None = None,
        batch: int = 8,
        waiting: int = 64,
        keep: int = 0,
        patience: float = 5.0,
    ) -> None:
        for name, value, least in (("batch", batch, 1), ("waiting", waiting, 1), ("keep", keep, 0)):
            if not isinstance(value, int) or value < least:
                raise ArgumentError(name, f"an int ≥ {least}", repr(value))
        for name, value in (("max_tokens", max_tokens), ("room", room), ("piece", piece)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(name, "an int ≥ 1 or None", repr(value))
        if not isinstance(patience, (int, float)) or not patience >= 0:
            raise ArgumentError("patience", "a number ≥ 0", repr(patience))
        if max_tokens is not None and model.max_tokens is not None and max_tokens > model.max_tokens:
            raise ArgumentError("max_tokens", f"at most {model.max_tokens}, what the model knows", max_tokens)
        limits = [n for n in (max_tokens, room, model.max_tokens) if n is not None]
        self.model, self.text, self.cp = model, text, cp
        self.max_tokens, self._room = min(limits, default=None), room
        self.ranks = Ranks(cp)
        self._rows = batch if model.flexible else 1
        self._piece = piece if model.goes_on else None
        self._prefixes = Prefixes(keep if model.resumes else 0)
        self._waiting = Waiting(waiting)
        self._readings: list[Reading] = []  # as they came
        self._read_as: dict[int, tuple[tuple[int, int], ...]] = {}  # the pieces of what is kept
        self._pieces = 0  # that were read while other prompts waited for theirs
        self.states = States(model, cp, self.ranks)
        self.batch = self.states.batch
        self._rate: float | None = None  # tokens a second that are read beside others
        self._owed, self._steps = 0.0, 0  # seconds of decoding, and steps, before the next piece
        self._last_key = 0
        self._stop_at: float | None = None
        self._patience = patience
        self._closed = threading.Event()

    # -- from any thread -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self.batch.rows) + len(self._readings)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def remembered(self) -> tuple[int, int]:
        """States that are kept for prompts that begin alike, and their bytes on this rank."""
        return len(self._prefixes), self._prefixes.size

    @property
    def stopping(self) -> bool:
        """Whether requests are refused because the engine stops, or has stopped."""
        return self._stop_at is not None or self._closed.is_set()

    def submit(self, *jobs: Completion) -> None:
        """Queue requests, all or none (rank 0).

        Raises:
            ArgumentError: one cannot be completed, by the argument's name. Busy: not now.
        """
        for job in jobs:
            self._check(job.request)
        if self.stopping:
            raise Stopping("the server is about to stop")
        for job in jobs:
            job.stream = Stream(self.text.decoder(), job.request.stop)
        self._waiting.put(*jobs)
        if self._closed.is_set():  # by now: nobody would take it out
            self._fail("the server has stopped")

    def stop(self) -> None:
        """Take no more requests, and return from `run` when those under way have ended or had their time."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._patience

    def late(self, grace: float = 0.0) -> bool:
        """Whether `run` goes on though requests under way have had their time after `stop`, by `grace` seconds."""
        stop_at = self._stop_at
        return stop_at is not None and not self._closed.is_set() and time.monotonic() > stop_at + grace

    def _check(self, request: Request) -> None:
        ids, vocab_size = request.ids, self.model.vocab_size
        if not ids:
            raise ArgumentError("prompt", "at least one token", "none")
        for name, tokens in (("prompt", ids), ("logit_bias", request.logit_bias or [0])):
            wrong = next((i for i in (min(tokens), max(tokens)) if not 0 <= i < vocab_size), None)
            if wrong is not None:
                raise ArgumentError(name, f"token ids from 0 to {vocab_size - 1}", wrong)
        if request.max_tokens < 1:
            raise ArgumentError("max_tokens", "an int ≥ 1", request.max_tokens)
        if self.max_tokens is not None and request.total > self.max_tokens:
            expected = f"at most {self.max_tokens} tokens together with max_tokens"
            raise ArgumentError("prompt", expected, f"{len(ids)} + {request.max_tokens}")
        if request.stop and not self.text.has_text:
            raise ArgumentError("stop", "nothing for a model without a tokenizer", list(request.stop))
        request.sampler(None)

    # -- every rank ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called on any rank.

        Raises:
            PeerError: a rank died or stalled; DisagreementError: a request failed on some of the ranks, or otherwise
                than on others; requests under way have failed.
        """
        try:
            if self.ranks.leads:
                while self._turn():
                    pass
                self._fail("the server has stopped")
                self.ranks.tell(Word(What.STOP))
            else:
                self._follow()
        except Overdue:
            self._fail("the server has stopped")
        except BaseException as error:
            late = self.late()
            self._closed.set()
            if isinstance(error, PeerError) and late:  # the others have left a piece before this one
                self._fail("the server has stopped")
                return
            self._fail(f"the server has failed ({type(error).__name__})")  # the whole of it is the operator's
            raise
        finally:
            self._closed.set()

    def _follow(self) -> None:
        while True:
            word = self.ranks.hear(self.stopping)
            if word.what == What.STOP:
                return
            self.states.do(word)

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _say(self, word: Word, row: Row = NOBODY) -> Exception | None:
        """Have all ranks do something; returns the error they all have. What concerns the batch is this rank's alone
        where others do not decode."""
        if (self.states.shared or word.what not in OF_THE_BATCH) and self.ranks.tell(word):
            self.stop()
        return self.states.do(word, row)

    def _turn(self) -> bool:
        """A piece of a prompt, where it is due, and a token of each sequence; False if nothing will come any more."""
        if self.ranks.tell_in_time():
            self.stop()
        if self._stop_at is not None:
            if not self.running + self.waiting or time.monotonic() > self._stop_at:
                return False
        self._let_go()
        while self.running < self._rows and self._begin():
            pass
        if self._readings and not (self.batch.rows and (self._owed > 0 or self._steps > 0)):
            self._read(self._next())
        if self.batch.rows:
            start = time.monotonic()
            self._decode()
            self._owed, self._steps = self._owed - (time.monotonic() - start), self._steps - 1
        return True

    def _let_go(self) -> None:
        """Forget requests that nobody waits for any more."""
        stay = [i for i, row in enumerate(self.batch.rows) if not row.job.cancelled]
        if len(stay) < len(self.batch.rows):
            jobs = [self.batch.rows[i].job for i in stay]
            error = self._say(Word(What.STAY, ids=torch.tensor(stay)) if stay else Word(What.CLEAR))
            self._fail_some(jobs, error)
        for reading in [reading for reading in self._readings if reading.job.cancelled]:
            self._end_reading(reading)

    def _begin(self) -> bool:
        """Take the next request, if there is one and room for it; with nothing else to do, wait a little for it."""
        job = self._waiting.first(0.0 if self.running else PAUSE / 2)
        takes = job is not None and self._fits(job) and self._waiting.take(job)
        if takes:
            self._readings.append(Reading(job))
        return takes

    def _next(self) -> Reading:
        """The prompt of which a piece is read now."""
        if len(self._readings) > 1:
            self._pieces += 1
        oldest = self._pieces % OLDEST == 0
        return self._readings[0] if oldest else min(self._readings, key=lambda reading: reading.left)

    def _under_way(self) -> list[Completion]:
        return [row.job for row in self.batch.rows] + [reading.job for reading in self._readings]

    def _fits(self, job: Completion) -> bool:
        """Whether there is memory for it beside those under way."""
        jobs = [job, *self._under_way()]
        return self._room is None or sum(job.request.total for job in jobs) <= self._room

    def _read(self, reading: Reading) -> None:
        """Read a piece of a prompt; after the last, the sequence joins the batch."""
        job, ids = reading.job, reading.job.request.ids
        if reading.stops is None:
            reading.kept, job.reused = self._prefixes.longest(ids)
            reading.at = reading.length = job.reused
            job.trail.before = self._read_as.get(reading.kept, ())
            reading.stops = self._prefixes.stops(ids, job.reused) if self.model.goes_on else [len(ids)]
        if reading.at < len(ids):
            end, start = self._piece_end(reading), time.monotonic()
            self._last_key += 1
            key, before = self._last_key, reading.key or reading.kept
            error = self._say(Word(What.READ, key, before, ids=torch.tensor(ids[reading.at : end])))
            if error is not None:
                self._end_reading(reading)
                self._fail_one(job, error)
                return
            reading.job.trail.pieces.append((reading.at, end))
            if self.batch.rows:
                self._pace(end - reading.at, start)
                self._steps = STEPS if end < len(ids) else 0
            if reading.key:
                self._say(Word(What.DROP, reading.key))
            reading.at, reading.key = end, key
            if end in reading.stops or end % (self._piece or end) == 0:
                self._keep(reading)
        if reading.at == len(ids):
            self._join(reading)
            self._end_reading(reading)

    def _piece_end(self, reading: Reading) -> int:
        """Where the next piece ends: a short one, if there are others whose tokens it holds up."""
        end = next(stop for stop in reading.stops if stop > reading.at)
        if self._piece is not None:
            end = min(end, (reading.at // self._piece + 1) * self._piece)
            if self.batch.rows:
                least = FIRST * (1 if self.cp is None else self.cp.size)
                end = min(end, reading.at + max(least, int((self._rate or 0) * HOLDUP)))
        return end

    def _pace(self, tokens: int, start: float) -> None:
        """Note how long a piece took, for the next one and for those it held up."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        took = time.monotonic() - start
        self._rate, self._owed = tokens / max(took, 1e-6), DECODING * took

    def _keep(self, reading: Reading) -> None:
        """Keep what is read so far for prompts that begin alike, where there is memory."""
        if not self._prefixes.budget:
            return
        if reading.kept not in self._prefixes:  # it has left, for another prompt's
            reading.kept = reading.length = 0
        size = size_since(self.states.before(reading.key), reading.length)
        gone = self._prefixes.put(reading.job.request.ids[: reading.at], reading.key, size, reading.kept)
        if gone is None:
            return
        for key in gone:
            self._say(Word(What.FORGET, key))
            self._read_as.pop(key, None)
        error = self._say(Word(What.KEEP, reading.key, reading.kept, reading.at))
        if error is None:
            reading.kept, reading.length = reading.job.trail.kept = reading.key, reading.at
            self._read_as[reading.key] = (*reading.job.trail.before, *reading.job.trail.pieces)
        else:
            self._prefixes.remove(reading.key)
            LOG.warning("a state is not kept: %s", error)

    def _join(self, reading: Reading) -> None:
        """The sequence is decoded from now on."""
        job, request = reading.job, reading.job.request
        try:
            generator = torch.Generator(self.model.device)
            if request.seed is None:
                generator.seed()
            else:
                generator.manual_seed(request.seed)
            job.sampler = request.sampler(generator)
            row = Row(job, job.sampler)
        except FATAL:
            raise
        except Exception as error:
            self._fail_one(job, error)
            return
        self._fail_some([job], self._say(Word(What.JOIN, start=reading.key or reading.kept), row))

    def _end_reading(self, reading: Reading) -> None:
        """Nothing more is read of the prompt; its state goes."""
        self._readings.remove(reading)
        if reading.key:
            self._say(Word(What.DROP, reading.key))

    def _decode(self) -> None:
        """A token of each sequence."""
        jobs = [row.job for row in self.batch.rows]
        try:
            tokens = self.batch.sample()
        except FATAL:
            raise
        except Exception as error:
            self._say(Word(What.CLEAR))
            self._fail_some(jobs, error)
            return
        stay = [not job.cancelled and not self._take(job, token) for job, token in zip(jobs, tokens)]
        if not any(stay):
            self._say(Word(What.CLEAR))
            return
        ids = torch.tensor([token if stays else -1 for token, stays in zip(tokens, stay)])
        self._fail_some([job for job, stays in zip(jobs, stay) if stays], self._say(Word(What.STEP, ids=ids)))

    def _take(self, job: Completion, token: int | None) -> bool:
        """Pass on a sequence's token; whether it was the last."""
        try:
            if token is not None:
                return job.take(token, self.text.end)
            job.emit(Failed("the model's result is not finite"))
        except Exception as error:
            self._fail_one(job, error)
        return True

    def _fail_some(self, jobs: Sequence[Completion], error: Exception | None) -> None:
        """Requests fail, if there was an error."""
        for job in jobs if error is not None else ():
            self._fail_one(job, error)

    def _fail_one(self, job: Completion, error: Exception) -> None:
        """A request fails; the others go on."""
        LOG.error("a request has failed", exc_info=error)
        _tell(job, f"the request has failed ({type(error).__name__})")  # the whole of it is the operator's

    def _fail(self, message: str) -> None:
        """End every request there is."""
        jobs = [*self._under_way(), *self._waiting.empty()]
        self.batch.clear()
        self._readings = []
        for job in jobs:
            _tell(job, message)


def _tell(job: Completion, message: str) -> None:
    """A request hears that it has failed."""
    try:
        job.emit(Failed(message))
    except Exception:  # whoever listens may be gone
        LOG.exception("nobody could be told that %s", message)
