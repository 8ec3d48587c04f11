"""Requests that wait, first come, first served; those nobody waits for any more make room."""

from __future__ import annotations

import threading
from collections import deque

from ..checks import check_int
from ..errors import RingLAError
from .completion import Completion


class Busy(RingLAError):
    """The server takes no request now: too many are waiting."""


class Stopping(Busy):
    """The server takes no request any more: it is about to stop."""


class Waiting:
    """A queue of at most so many requests, filled and emptied by several threads."""

    def __init__(self, most: int) -> None:
        check_int("most", most, 1)
        self.most = most
        self._jobs: deque[Completion] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            self._let_go()
            return len(self._jobs)

    def put(self, *jobs: Completion) -> None:
        """Queue requests, all of them or none. Raises `Busy` if there are too many."""
        with self._changed:
            self._let_go()
            if len(self._jobs) + len(jobs) > self.most:
                raise Busy(f"{len(self._jobs)} requests are waiting already, of at most {self.most}")
            self._jobs.extend(jobs)
            self._changed.notify()

    def first(self, seconds: float = 0.0) -> Completion | None:
        """The request whose turn it is, which stays; waits for one so long."""
        with self._changed:
            self._let_go()
            if not self._jobs and seconds:
                self._changed.wait(seconds)
                self._let_go()
            return self._jobs[0] if self._jobs else None

    def take(self, job: Completion) -> bool:
        """`job` leaves; False if it has left already."""
        with self._changed:
            there = job in self._jobs
            if there:
                self._jobs.remove(job)
            return there

    def empty(self) -> list[Completion]:
        """All of them, which leave."""
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
            return jobs

    def _let_go(self) -> None:
        if any(job.cancelled for job in self._jobs):
            self._jobs = deque(job for job in self._jobs if not job.cancelled)
