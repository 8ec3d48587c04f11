"""Sequences that are decoded, whose they are, and what becomes of a token. On rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from .batch import NOBODY, Batch, Row
from .completion import Completion
from .model import FATAL
from .ranks import What, Word
from .text import Text


class Decoding:
    """The sequences of a batch, and the requests they answer.

    Args:
        batch: what is decoded. text: the vocabulary. device: where tokens are chosen.
        say: has all ranks do something, and returns the error they all have.
    """

    def __init__(
        self, batch: Batch, text: Text, device: torch.device, say: Callable[[Word, Row], Exception | None]
    ) -> None:
        self._batch, self._text, self._device, self._say = batch, text, device, say
        self._jobs: dict[int, Completion] = {}  # by the numbers of their rows
        self._numbers = itertools.count(1)

    @property
    def jobs(self) -> list[Completion]:
        """Whose sequences are decoded, in the order of the batch's rows."""
        return [self._jobs[row.number] for row in self._batch.rows]

    def let_go(self) -> None:
        """Forget those that nobody waits for any more."""
        jobs = self.jobs
        stay = [i for i, job in enumerate(jobs) if not job.cancelled]
        if len(stay) < len(jobs):
            word = Word(What.STAY, ids=torch.tensor(stay, device="cpu")) if stay else Word(What.CLEAR)
            fail_all([jobs[i] for i in stay], self._say(word, NOBODY))
        self._jobs = {row.number: self._jobs[row.number] for row in self._batch.rows}

    def join(self, job: Completion, state: int) -> None:
        """A request's prompt is read, up to that state: its sequence is decoded from now on."""
        try:
            generator = torch.Generator(self._device)
            if job.request.seed is None:
                generator.seed()
            else:
                generator.manual_seed(job.request.seed)
            job.sampler = job.request.sampler(generator)
        except FATAL:
            raise
        except Exception as error:
            job.fail("the request has failed", error)
            return
        row = Row(next(self._numbers), job.sampler)
        self._jobs[row.number] = job
        fail_all([job], self._say(Word(What.JOIN, start=state), row))

    def step(self) -> None:
        """A token of each sequence. One that cannot be chosen, or told, fails its request alone; an error of the step
        fails all, as what is left of their states is not known."""
        jobs = self.jobs
        try:
            if self._batch.choose() and (failed := self._say(Word(What.AHEAD), NOBODY)) is not None:
                raise failed
            tokens = self._batch.told()
        except FATAL:
            raise
        except Exception as error:
            self._say(Word(What.CLEAR), NOBODY)
            fail_all(jobs, error)
            return
        stay = [not job.cancelled and not self._take(job, token) for job, token in zip(jobs, tokens)]
        if not any(stay):
            self._say(Word(What.CLEAR), NOBODY)
            return
        ids = torch.tensor([token if stays else -1 for token, stays in zip(tokens, stay)], device="cpu")
        fail_all([job for job, stays in zip(jobs, stay) if stays], self._say(Word(What.STEP, ids=ids), NOBODY))

    def _take(self, job: Completion, token: int | Exception | None) -> bool:
        """Pass on a sequence's token; whether it was the last."""
        try:
            if isinstance(token, int):
                return job.take(token, self._text.end)
            if token is None:
                job.fail("the model's result is not finite")
            else:
                job.fail("the request has failed", token)
        except Exception as error:
            job.fail("the request has failed", error)
        return True


def fail_all(jobs: Sequence[Completion], error: Exception | None) -> None:
    """Requests fail, if there was an error."""
    for job in jobs if error is not None else ():
        job.fail("the request has failed", error)
