"""Requests in, tokens out: prompts read by all ranks, piece by piece, decoded by rank 0 as one batch.

    engine = Engine(model, text, cp)
    engine.submit(job)          # rank 0, from any thread; job.emit hears of its tokens
    engine.run()                # every rank, until engine.stop(): rank 0 decides, the others follow

Rank 0 goes round and round: a piece of the prompt whose turn it is, then a token of each sequence of the batch. So a
long prompt holds up others' tokens by one piece at a time, and who goes away is noticed between two pieces or tokens.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from ..context import ContextParallel
from ..errors import ArgumentError
from ..inference import Prefilled
from .batch import Batch
from .completion import Completion, Failed, Request
from .memory import held
from .model import Served
from .prefixes import Prefixes
from .ranks import PAUSE, Ranks, What, Word
from .text import Stream, Text
from .waiting import Busy, Waiting


@dataclass
class Reading:
    """A prompt of which `at` tokens are read; what the model remembers of them is state `key` (0: nothing yet)."""

    job: Completion
    at: int = 0
    key: int = 0
    kept: bool = True
    """Whether state `key` stays when the reading has gone on."""


class Engine:
    """A model that answers requests. Collective: every rank makes one, then calls `run`.

    Args:
        model: what reads and decodes. text: its vocabulary.
        cp: the ranks a prompt is split over; None: this process alone.
        max_tokens: the most tokens of a prompt and its completion together; None: the model's own limit.
        room: the tokens there is memory for, those under way aligned (the longest, times their number); None: any.
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
        self._states: dict[int, Prefilled] = {}
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
    def stopping(self) -> bool:
        """Whether requests are refused because the engine stops, or has stopped."""
        return self._stop_at is not None or self._closed.is_set()

    def submit(self, job: Completion) -> None:
        """Queue a request (rank 0).

        Raises:
            ArgumentError: it cannot be completed, by the argument's name. Busy: not now.
        """
        self._check(job.request)
        if self.stopping:
            raise Busy("the server is about to stop")
        job.stream = Stream(self.text.decoder(), job.request.stop)
        self._waiting.put(job)
        if self._closed.is_set():  # by now: nobody would take it out
            self._fail("the server has stopped")

    def stop(self) -> None:
        """Take no more requests, and return from `run` when those under way have ended or had their time."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._patience

    def _check(self, request: Request) -> None:
        ids, vocab_size = request.ids, self.model.vocab_size
        if not ids:
            raise ArgumentError("prompt", "at least one token", "none")
        wrong = next((i for i in (min(ids), max(ids)) if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise ArgumentError("prompt", f"token ids from 0 to {vocab_size - 1}", wrong)
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
            PeerError: a rank died or stalled; requests under way have failed.
        """
        if not self.ranks.leads:
            self._follow()
            return
        try:
            while self._turn():
                pass
            self._fail("the server has stopped")
            self.ranks.tell(Word(What.STOP))
        except BaseException as error:
            self._closed.set()
            self._fail(f"the server has failed ({type(error).__name__})")  # the whole of it is the operator's
            raise
        finally:
            self._closed.set()

    def _follow(self) -> None:
        while True:
            word = self.ranks.hear(self.stopping)
            if word.what == What.STOP:
                self._closed.set()
                return
            self._do(word)

    def _do(self, word: Word) -> None:
        """What all ranks do alike."""
        if word.what == What.READ:
            before = self._states[word.start].states if word.start else None
            ids = word.ids[None].to(self.model.device)
            self._states[word.key] = self.model.read(ids, before, self.cp)
        elif word.what == What.DROP:
            del self._states[word.key]

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _say(self, word: Word) -> None:
        """Have all ranks do something."""
        if self.ranks.tell(word):
            self.stop()
        self._do(word)

    def _turn(self) -> bool:
        """A piece of a prompt and a token of each sequence; False if nothing will come any more."""
        if self.ranks.tell_in_time():
            self.stop()
        if self._stop_at is not None:
            if not self.running + self.waiting or time.monotonic() > self._stop_at:
                return False
        self._let_go()
        if self._reading is None and len(self.batch.rows) < self._rows:
            self._begin()
        if self._reading is not None:
            self._read()
        if self.batch.rows:
            self._decode()
        return True

    def _let_go(self) -> None:
        """Forget requests that nobody waits for any more."""
        self.batch.keep([i for i, row in enumerate(self.batch.rows) if not row.job.cancelled])
        if self._reading is not None and self._reading.job.cancelled:
            self._forget(self._reading)
            self._reading = None

    def _begin(self) -> None:
        """Take the next request, if there is one and room for it; with nothing else to do, wait a little for it."""
        job = self._waiting.first(0.0 if self.batch.rows else PAUSE / 2)
        if job is not None and self._fits(job) and self._waiting.take(job):
            key, job.reused = self._prefixes.longest(job.request.ids)
            self._reading = Reading(job, job.reused, key)

    def _fits(self, job: Completion) -> bool:
        """Whether there is memory for it beside those under way."""
        jobs = [job, *(row.job for row in self.batch.rows)]
        return self._room is None or len(jobs) * max(job.request.total for job in jobs) <= self._room

    def _read(self) -> None:
        """Read a piece of the prompt; after the last, the sequence joins the batch."""
        reading, ids = self._reading, self._reading.job.request.ids
        if reading.at < len(ids):
            size = self._piece or len(ids)
            end = min(len(ids), (reading.at // size + 1) * size)
            self._last_key += 1
            self._say(Word(What.READ, self._last_key, reading.key, torch.tensor(ids[reading.at : end])))
            self._forget(reading)
            size = held(self._states[self._last_key]) if self._prefixes.budget else 0
            gone = self._prefixes.put(ids[:end], self._last_key, size)
            reading.at, reading.key, reading.kept = end, self._last_key, self._last_key not in gone
            for key in gone:
                if key != reading.key:
                    self._say(Word(What.DROP, key))
        if reading.at == len(ids):
            request = reading.job.request
            generator = torch.Generator(self.model.device)
            if request.seed is None:
                generator.seed()
            else:
                generator.manual_seed(request.seed)
            self.batch.add(reading.job, self._states[reading.key], request.sampler(generator))
            self._forget(reading)
            self._reading = None

    def _forget(self, reading: Reading) -> None:
        """The state a reading has gone on from, where nothing else keeps it."""
        if reading.key and not reading.kept:
            self._say(Word(What.DROP, reading.key))

    def _decode(self) -> None:
        """A token of each sequence."""
        tokens, left = self.batch.sample(), []
        for i, (row, token) in enumerate(zip(self.batch.rows, tokens)):
            if row.job.cancelled:
                continue
            if token is None:
                row.job.emit(Failed("the model's result is not finite"))
            elif not row.job.take(token, self.text.end):
                left.append(i)
        self.batch.keep(left)
        if left:
            self.batch.step([tokens[i] for i in left])

    def _fail(self, message: str) -> None:
        """End every request there is."""
        reading = [] if self._reading is None else [self._reading.job]
        jobs = [*(row.job for row in self.batch.rows), *reading, *self._waiting.empty()]
        self.batch.keep([])
        self._reading = None
        for job in jobs:
            job.emit(Failed(message))
