"""Requests in, tokens out: prompts read by all ranks, piece by piece, decoded as one batch.

    engine = Engine(model, text, cp)
    engine.submit(job)          # rank 0, from any thread; job.emit hears of its tokens
    engine.run()                # every rank, until engine.stop(): rank 0 decides, the others follow

Rank 0 goes round and round: a piece of a prompt, then tokens of the sequences of the batch for about as long. So a long
prompt takes half of others' speed and holds them up by one piece at a time, which is short while there are others; who
goes away is noticed between two pieces or tokens. Of several prompts the one with the fewest tokens left is read on,
now and then the one that came first.

Where keys stay on the rank that read them, or each rank has a part of the weights, all ranks take each step together;
rank 0 says of which tokens. A model whose weights and states are the same on all ranks is decoded by rank 0 alone.

An error in a request fails that request, where it is the same on all ranks; any other ends the server on all of them.
"""

from __future__ import annotations

import threading
import time

from ..checks import check_flag, check_has, check_kind
from ..context import ContextParallel
from ..errors import ArgumentError, PeerError
from .batch import NOBODY, Row
from .capacity import Capacity
from .completion import Completion, Failed, Stopped
from .decoding import Decoding, fail_all
from .model import Served, check_served
from .pace import Pace
from .prefixes import Prefixes
from .prompts import Prompts, Reading
from .ranks import DECODING as OF_THE_BATCH
from .ranks import PAUSE, Ranks, What, Word
from .states import States
from .text import Stream, Text
from .tiers import Keep
from .waiting import Busy, Stopping, Waiting


class Overdue(BaseException):
    """Raised into a piece by who stops the engine, when requests under way have had their time."""


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
        keep: bytes of states kept for prompts that begin alike, on each rank, on the model's device; `Keep`: in host
            memory and on disk, too.
        patience: seconds that requests under way get to end after `stop`.
        capture: decode by `StaticBatch`, on GPUs a CUDA graph a step; a model of Transformers that cannot is decoded
            plainly, and the log says why (`trial`).
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
        keep: int | Keep = 0,
        patience: float = 5.0,
        capture: bool = False,
    ) -> None:
        check_served(model)
        check_has("text", text, ("end", "has_text", "encode", "chat", "decoder", "token"), "a Text, such as NoText()")
        check_kind("cp", cp, ContextParallel, optional=True)
        check_flag("capture", capture)
        capacity = Capacity(
            max_tokens=max_tokens,
            room=room,
            piece=piece,
            batch=batch,
            waiting=waiting,
            keep=keep if isinstance(keep, Keep) else Keep(keep),
            patience=patience,
        ).of(model)
        self.model, self.text, self.cp, self._capacity = model, text, cp, capacity
        self.ranks = Ranks(cp)
        self.states = States(model, cp, self.ranks, capacity.keep, capacity.batch if capture else 0)
        self.batch = self.states.batch
        self._waiting, self._prefixes = Waiting(capacity.waiting), Prefixes(capacity.keep.budgets, model.goes_on)
        self._pace = Pace(model.device, 1 if cp is None else cp.size)
        self._prompts = Prompts(self.states, self._prefixes, capacity.piece, self._pace, self._say)
        self._decoding = Decoding(self.batch, text, model.device, self._say, self.states.do, self.states.together)
        self._stop_at: float | None = None
        self._closed = threading.Event()
        self._turns = threading.Lock()  # held by the thread that runs

    # -- from any thread -----------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of a prompt and its completion together; None: any number."""
        return self._capacity.max_tokens

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self.batch.rows) + len(self._prompts)

    @property
    def decoding(self) -> list[Completion]:
        """Whose sequences are decoded, in the order of the batch's rows (rank 0)."""
        return self._decoding.jobs

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def remembered(self) -> tuple[int, int]:
        """States that are kept for prompts that begin alike, and their bytes on this rank."""
        return len(self._prefixes), self._prefixes.sizes[0]

    @property
    def stopping(self) -> bool:
        """Whether requests are refused because the engine stops, or has stopped."""
        return self._stop_at is not None or self._closed.is_set()

    def submit(self, *jobs: Completion) -> None:
        """Queue requests, all or none (rank 0).

        Raises:
            ArgumentError: one cannot be completed, by the argument's name. Busy: not now.
        """
        for i, job in enumerate(jobs):
            check_kind("jobs", job, Completion)
            if job.stream is not None or job in jobs[:i]:
                raise ArgumentError("jobs", "requests of which each is submitted once", "one that was before")
            self._capacity.check(job.request, self.model, self.text)
        if self.stopping:
            raise Stopping("the server is about to stop")
        for job in jobs:
            job.stream = Stream(self.text.decoder(), job.request.stop)
        try:
            self._waiting.put(*jobs)
        except Busy:  # they may come again
            for job in jobs:
                job.stream = None
            raise
        if self._closed.is_set():  # by now: nobody would take it out
            self._end_all()

    def stop(self) -> None:
        """Take no more requests, and return from `run` when those under way have ended or had their time."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._capacity.patience

    def late(self, grace: float = 0.0) -> bool:
        """Whether `run` goes on though requests under way have had their time after `stop`, by `grace` seconds."""
        stop_at = self._stop_at
        return stop_at is not None and not self._closed.is_set() and time.monotonic() > stop_at + grace

    # -- every rank ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called on any rank.

        Raises:
            ArgumentError: another thread is in this call.
            PeerError: a rank died or stalled; DisagreementError: a request failed on some of the ranks, or otherwise
                than on others; requests under way have failed.
        """
        if not self._turns.acquire(blocking=False):
            raise ArgumentError("run", "one thread that calls it", "a second")
        try:
            if self.ranks.leads:
                self._prompts.find()
                while self._turn():
                    pass
                self._end_all()
                self._prompts.store()
                self.ranks.tell(Word(What.STOP))
            else:
                self._follow()
        except Overdue:
            self._end_all()
        except BaseException as error:
            late = self.late()
            self._closed.set()
            if isinstance(error, PeerError) and self.cp is not None:
                self.cp.comm.give_up(error)  # else this rank's device may wait for them without end
            if isinstance(error, PeerError) and late:  # the others have left a piece before this one
                self._end_all()
                return
            why = type(error).__name__  # the whole of it is the operator's
            self._end_all(f"the server has failed ({why})", Failed)
            raise
        finally:
            self._closed.set()
            self.batch.close()
            self._turns.release()

    def _follow(self) -> None:
        while True:
            word = self.ranks.hear(self.stopping)
            if word.what == What.STOP:
                return
            self.states.follow(word)

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _say(self, word: Word, row: Row = NOBODY) -> Exception | None:
        """Have all ranks do something; returns the error they all have. What concerns the batch is this rank's alone
        where others do not decode."""
        if (self.states.together or word.what not in OF_THE_BATCH) and self.ranks.tell(word):
            self.stop()
        return self.states.do(word, row)

    def _turn(self) -> bool:
        """A piece of a prompt, where it is due, and tokens of each sequence; False if nothing will come any more."""
        if self.ranks.tell_in_time():
            self.stop()
        if self._stop_at is not None:
            if not self.running + self.waiting or time.monotonic() > self._stop_at:
                return False
        self._decoding.let_go()
        self._prompts.let_go()
        while self.running < self._capacity.batch and self._begin():
            pass
        if self._prompts and not (self.batch.rows and self._pace.decodes):
            self._read(self._prompts.next())
        if self.batch.rows:
            start = time.monotonic()
            steps = self._decoding.step()
            self._pace.decoded(time.monotonic() - start, steps)
        return True

    def _begin(self) -> bool:
        """Take the next request, if there is one and room for it; with nothing else to do, wait a little for it."""
        job = self._waiting.first(0.0 if self.running else PAUSE / 2)
        takes = (
            job is not None
            and self._capacity.fit(j.request.total for j in (job, *self._under_way()))
            and self._waiting.take(job)
        )
        if takes:
            self._prompts.add(job)
        return takes

    def _under_way(self) -> list[Completion]:
        return self.decoding + self._prompts.jobs

    def _read(self, reading: Reading) -> None:
        """Read a piece of a prompt; after the last, the sequence joins the batch."""
        error = self._prompts.read(reading, beside=bool(self.batch.rows))
        if error is None and reading.left:
            return
        if error is None:
            self._decoding.join(reading.job, reading.state)
        self._prompts.end(reading)
        fail_all([reading.job], error)

    def _end_all(self, message: str = "the server has stopped", kind: type[Failed] = Stopped) -> None:
        """End every request there is."""
        jobs = [*self._decoding.under_way, *self._prompts.jobs, *self._waiting.empty()] if self.ranks.leads else []
        for job in dict.fromkeys(jobs):  # one may be in two places
            job.fail(message, kind=kind)
        self.batch.clear()  # the other ranks know of no jobs
        self._prompts.clear()
