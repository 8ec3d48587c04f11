"""Sequences that are decoded, whose they are, and what becomes of a token. On rank 0."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .batch import NOBODY, Batch, Row
from .completion import Completion
from .model import FATAL
from .ranks import What, Word
from .sampling import ChosenToken
from .text import Text

Doing = Callable[[Word, Row], Exception | None]
HOLD = 0.01
"""Seconds for which ranks that decode together step on without a word, about: so long does who comes or goes wait."""


class Decoding:
    """The sequences of a batch, and the requests they answer.

    Args:
        batch: what is decoded. text: the vocabulary.
        say: has all ranks do something, and returns the error they all have. do: has this one do it, where the others
            do so by themselves.
        together: whether all ranks decode, which are told of several steps at once.
    """

    def __init__(self, batch: Batch, text: Text, say: Doing, do: Doing, together: bool) -> None:
        self._batch, self._text, self._say, self._do = batch, text, say, do
        self._hold, self._took = HOLD if together else 0.0, math.inf  # seconds of the last step
        self._jobs: dict[int, Completion] = {}  # by the numbers of their rows
        self._numbers = itertools.count(1)

    @property
    def jobs(self) -> list[Completion]:
        """Whose sequences are decoded, in the order of the batch's rows."""
        return [self._jobs[row.number] for row in self._batch.rows]

    @property
    def under_way(self) -> list[Completion]:
        """Who waits for more, also where a failed step has left no rows."""
        return [job for job in self._jobs.values() if not job.over]

    def let_go(self) -> None:
        """Forget those that nobody waits for any more."""
        jobs = self.jobs
        stay = [i for i, job in enumerate(jobs) if not job.cancelled]
        if len(stay) < len(jobs):
            if stay:
                self._keep(stay, [jobs[i] for i in stay])
            else:
                self._say(Word(What.CLEAR), NOBODY)
        self._jobs = {row.number: self._jobs[row.number] for row in self._batch.rows}

    def join(self, job: Completion, state: int) -> None:
        """A request's prompt is read, up to that state: its sequence is decoded from now on."""
        try:
            row = Row(next(self._numbers), job.request.chooser())
        except Exception as error:  # it was well when it was submitted
            job.fail("the request has failed", error)
            return
        self._jobs[row.number] = job
        fail_all([job], self._say(Word(What.JOIN, key=row.chooser.ways, start=state), row))

    def step(self) -> int:
        """A token of each sequence, or several, one after the other; how many. One that cannot be chosen, or told,
        fails its request alone; an error of a step fails all, as what is left of their states is not known."""
        jobs, start = self.jobs, time.monotonic()
        try:
            steps = self._steps(jobs, self._batch.choose())
            tokens = None if steps else self._batch.told()
        except FATAL:
            raise
        except Exception as error:
            self._fail(jobs, error)
            return 1
        if tokens is not None:
            self._step_behind(jobs, tokens)
            return 1
        self._go_ahead(jobs, steps)
        self._took = (time.monotonic() - start) / steps
        return steps

    def _steps(self, jobs: Sequence[Completion], most: int) -> int:
        """How many steps are launched before the host knows their tokens, at one word to the other ranks."""
        least = min(job.request.max_tokens - job.decoded for job in jobs)
        return min(most, least, max(1, int(self._hold / self._took)))

    def _step_behind(self, jobs: Sequence[Completion], tokens: Sequence[ChosenToken | None]) -> None:
        """A step that is launched when its tokens are told."""
        stay = [not job.cancelled and not self._take(job, token) for job, token in zip(jobs, tokens)]
        if not any(stay):
            self._say(Word(What.CLEAR), NOBODY)
            return
        ids = torch.tensor([token.token if token and stays else -1 for token, stays in zip(tokens, stay)], device="cpu")
        fail_all([job for job, stays in zip(jobs, stay) if stays], self._say(Word(What.STEP, ids=ids), NOBODY))

    def _go_ahead(self, jobs: Sequence[Completion], steps: int) -> None:
        """Steps that are launched each before its tokens are told. All ranks take as many: who ends on the way leaves
        behind the last, and so does everyone where tokens cannot be told."""
        word, going = Word(What.AHEAD, key=int(self._batch.sends), length=steps), dict(enumerate(jobs))
        tokens: list[ChosenToken | None] = []
        error = failed = None
        for step in range(steps):
            if step and error is None:
                error = self._tried(self._batch.choose)[1]
            failed = self._do(word, NOBODY) if step else self._say(word, NOBODY)
            if failed is not None:  # on all ranks, which take none of the others
                break
            if error is None:
                tokens, error = self._tried(self._batch.told)
            for i, job in [*going.items()] if error is None else ():
                if job.cancelled or self._take(job, tokens[i]):
                    del going[i]
        error = error or failed
        if error is not None:
            self._fail([*going.values()], error)
        elif not going:
            self._say(Word(What.CLEAR), NOBODY)
        elif len(going) < len(jobs):
            self._keep([*going], [*going.values()])

    def _tried(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """What a call gave, or its error where that is not the server's."""
        try:
            return call(), None
        except FATAL:
            raise
        except Exception as error:
            return None, error

    def _keep(self, rows: Sequence[int], jobs: Sequence[Completion]) -> None:
        """These rows stay, whose jobs those are."""
        fail_all(jobs, self._say(Word(What.STAY, ids=torch.tensor(rows, device="cpu")), NOBODY))

    def _fail(self, jobs: Sequence[Completion], error: Exception) -> None:
        """Nothing is decoded any more, for an error."""
        self._say(Word(What.CLEAR), NOBODY)
        fail_all(jobs, error)

    def _take(self, job: Completion, token: ChosenToken | None) -> bool:
        """Pass on a sequence's token; whether it was the last."""
        try:
            if token is not None:
                return job.take(token, self._text.end)
            job.fail("the model's result is not finite")
        except Exception as error:
            job.fail("the request has failed", error)
        return True


def fail_all(jobs: Sequence[Completion], error: Exception | None) -> None:
    """Requests fail, if there was an error."""
    for job in jobs if error is not None else ():
        job.fail("the request has failed", error)
