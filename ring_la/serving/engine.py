"""Requests in, tokens out: prompts read by all ranks, piece by piece, decoded by rank 0 as one batch.

    engine = Engine(model, text, cp)
    engine.submit(job)          # rank 0, from any thread; job.emit hears of its tokens
    engine.run()                # every rank, until engine.stop(): rank 0 decides, the others follow

Rank 0 goes round and round: a piece of the prompt whose turn it is, then tokens of the sequences of the batch for about
as long. So a long prompt takes half of others' speed and holds them up by one piece at a time, which is short while
there are others; who goes away is noticed between two pieces or tokens.

An error in a request fails that request, where it is the same on all ranks; any other ends the server on all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch

from ..context import ContextParallel
from ..errors import ArgumentError, PeerError
from .batch import Batch
from .completion import Completion, Failed, Request
from .model import Served
from .prefixes import Prefixes, size_since
from .ranks import PAUSE, Ranks, What, Word
from .states import FATAL, States
from .text import Stream, Text
from .waiting import Stopping, Waiting

LOG = logging.getLogger(__name__)
DECODING = 1.0
"""Seconds of decoding for each second of reading, where both are wanted."""
HOLDUP = 0.25
"""Seconds that others' tokens are held up by a piece, about."""
FIRST = 512
"""Tokens a rank reads beside others before it is known how long that takes, and the least."""


class Overdue(BaseException):
    """Raised into a piece by who stops the engine, when requests under way have had their time."""


@dataclass
class Reading:
    """A prompt that is being read.

    Attributes:
        at: tokens that are read. key: the state that is what the model remembers of them; 0: none yet.
        stops: where a state is kept, the prompt's end last.
        kept, length: what is kept of its beginning, and how many tokens that is; 0: nothing.
    """

    job: Completion
    at: int
    stops: list[int]
    key: int = 0
    kept: int = 0
    length: int = 0


class Engine:
    """A model that answers requests. Collective: every rank makes one, then calls `run`.

    Args:
        model: what reads and decodes. text: its vocabulary.
        cp: the ranks a prompt is split over; None: this process alone.
        max_tokens: the most tokens of a prompt and its completion together; None: the model's own limit.
        room: the tokens there is memory for, of all sequences under way; None: any.
        piece: the most tokens of a prompt that are read at once; None: any number.
        batch: the most sequences decoded side by side (one, where the model's states cannot be joined).
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
        self.batch = Batch(model)
        self._rows = batch if model.flexible else 1
        self._piece = piece if model.flexible else None
        self._prefixes = Prefixes(keep if model.flexible else 0)
        self._waiting = Waiting(waiting)
        self._reading: Reading | None = None
        self.states = States(model, cp, self.ranks)
        self._rate: float | None = None  # tokens a second that are read beside others
        self._owed = 0.0  # seconds of decoding before the next piece
        self._last_key = 0
        self._stop_at: float | None = None
        self._patience = patience
        self._closed = threading.Event()

    # -- from any thread -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self.batch.rows) + (self._reading is not None)

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

    def _say(self, word: Word) -> Exception | None:
        """Have all ranks do something; returns the error they all have."""
        if self.ranks.tell(word):
            self.stop()
        return self.states.do(word)

    def _turn(self) -> bool:
        """A piece of a prompt, where it is due, and a token of each sequence; False if nothing will come any more."""
        if self.ranks.tell_in_time():
            self.stop()
        if self._stop_at is not None:
            if not self.running + self.waiting or time.monotonic() > self._stop_at:
                return False
        self._let_go()
        if self._reading is None and len(self.batch.rows) < self._rows:
            self._begin()
        if self._reading is not None and not (self.batch.rows and self._owed > 0):
            self._read()
        if self.batch.rows:
            start = time.monotonic()
            self._decode()
            self._owed -= time.monotonic() - start
        return True

    def _let_go(self) -> None:
        """Forget requests that nobody waits for any more."""
        self.batch.keep([i for i, row in enumerate(self.batch.rows) if not row.job.cancelled])
        if self._reading is not None and self._reading.job.cancelled:
            self._end_reading()

    def _begin(self) -> None:
        """Take the next request, if there is one and room for it; with nothing else to do, wait a little for it."""
        job = self._waiting.first(0.0 if self.batch.rows else PAUSE / 2)
        if job is not None and self._fits(job) and self._waiting.take(job):
            key, job.reused = self._prefixes.longest(job.request.ids)
            stops = self._prefixes.stops(job.request.ids, job.reused)
            self._reading = Reading(job, job.reused, stops, 0, key, job.reused)

    def _fits(self, job: Completion) -> bool:
        """Whether there is memory for it beside those under way."""
        jobs = [job, *(row.job for row in self.batch.rows)]
        return self._room is None or sum(job.request.total for job in jobs) <= self._room

    def _read(self) -> None:
        """Read a piece of the prompt; after the last, the sequence joins the batch."""
        reading, ids = self._reading, self._reading.job.request.ids
        if reading.at < len(ids):
            end, start = self._piece_end(reading), time.monotonic()
            self._last_key += 1
            key, before = self._last_key, reading.key or reading.kept
            error = self._say(Word(What.READ, key, before, ids=torch.tensor(ids[reading.at : end])))
            if error is not None:
                self._end_reading()
                self._fail_one(reading.job, error)
                return
            reading.job.trail.pieces.append((reading.at, end))
            if self.batch.rows:
                self._pace(end - reading.at, start)
            if reading.key:
                self._say(Word(What.DROP, reading.key))
            reading.at, reading.key = end, key
            if end in reading.stops or end % (self._piece or end) == 0:
                self._keep(reading)
        if reading.at == len(ids):
            self._join(reading)
            self._end_reading()

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
        size = size_since(self.states.before(reading.key), reading.length)
        gone = self._prefixes.put(reading.job.request.ids[: reading.at], reading.key, size, reading.kept)
        if gone is None:
            return
        for key in gone:
            self._say(Word(What.FORGET, key))
        error = self._say(Word(What.KEEP, reading.key, reading.kept, reading.at))
        if error is None:
            reading.kept, reading.length = reading.job.trail.kept = reading.key, reading.at
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
            self.batch.add(job, self.states.before(reading.key or reading.kept), job.sampler)
        except FATAL:
            raise
        except Exception as error:
            self._fail_one(job, error)

    def _end_reading(self) -> None:
        """Nothing more is read of the prompt; its state goes."""
        key, self._reading = self._reading.key, None
        if key:
            self._say(Word(What.DROP, key))

    def _decode(self) -> None:
        """A token of each sequence."""
        jobs = [row.job for row in self.batch.rows]
        left = list(range(len(jobs)))
        try:
            tokens = self.batch.sample()
            left = [i for i, job in enumerate(jobs) if not job.cancelled and not self._take(job, tokens[i])]
            self.batch.keep(left)
            if left:
                self.batch.step([tokens[i] for i in left])
        except FATAL:
            raise
        except Exception as error:  # in a step of all: what is left of their states is not known
            self.batch.clear()
            for i in left:
                self._fail_one(jobs[i], error)

    def _take(self, job: Completion, token: int | None) -> bool:
        """Pass on a sequence's token; whether it was the last."""
        try:
            if token is not None:
                return job.take(token, self.text.end)
            job.emit(Failed("the model's result is not finite"))
        except Exception as error:
            self._fail_one(job, error)
        return True

    def _fail_one(self, job: Completion, error: Exception) -> None:
        """A request fails; the others go on."""
        LOG.error("a request has failed", exc_info=error)
        _tell(job, f"the request has failed ({type(error).__name__})")  # the whole of it is the operator's

    def _fail(self, message: str) -> None:
        """End every request there is."""
        reading = [] if self._reading is None else [self._reading.job]
        jobs = [*(row.job for row in self.batch.rows), *reading, *self._waiting.empty()]
        self.batch.clear()
        self._reading = None
        for job in jobs:
            _tell(job, message)


def _tell(job: Completion, message: str) -> None:
    """A request hears that it has failed."""
    try:
        job.emit(Failed(message))
    except Exception:  # whoever listens may be gone
        LOG.exception("nobody could be told that %s", message)
