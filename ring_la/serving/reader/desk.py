"""Prompts that a reader was asked for: between the threads that answer requests and the one that reads.

A prompt is there as long as anybody is connected for it. Several may ask for one under the same name, as the workers of
a tensor-parallel vLLM do: it is read once, and kept until as many as were announced have had it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError

PATIENCE = 60.0
"""Seconds that a prompt is kept for those of its takers that have not come yet."""


class Unread(Exception):
    """A prompt could not be read; the text is for who asked."""


class AskedPrompt:
    """One prompt.

    Attributes:
        ids: its tokens, int64 ``[T]``. takers: how many will come for it. key: its number among the ranks; 0: none yet.
        here, gone: how many are connected for it, and were. done: set when it is read, or has failed.
        parcels: what each rank hands over. error: why it could not be read.
    """

    def __init__(self, ids: Tensor, takers: int) -> None:
        self.ids, self.takers, self.key = ids, takers, 0
        self.here = self.gone = 0
        self.left = 0.0
        self.done = threading.Event()
        self.parcels: Sequence[dict[str, Any]] = ()
        self.error: str | None = None

    def unwanted(self) -> bool:
        """Whether nobody will come for it any more."""
        return not self.here and (self.gone >= self.takers or time.monotonic() - self.left > PATIENCE)


class Desk:
    """All prompts under way; any thread may call.

    Args:
        waiting: the most prompts that wait.
    """

    def __init__(self, waiting: int = 1024) -> None:
        self._most = waiting
        self._asked: dict[str, AskedPrompt] = {}
        self._queue: list[str] = []
        self._change = threading.Condition()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Prompts that nobody has begun to read."""
        return len(self._queue)

    def ask(self, name: str, ids: Tensor, takers: int) -> AskedPrompt:
        """Ask for a prompt, or join those that did. `leave` follows.

        Raises:
            ArgumentError: other tokens under a name that is taken. Unread: too many wait, or the reader stops.
        """
        with self._change:
            if self._closed:
                raise Unread("the reader has stopped")
            asked = self._asked.get(name)
            if asked is None:
                if len(self._queue) >= self._most:
                    self._give_up()
                if len(self._queue) >= self._most:
                    raise Unread(f"{self._most} prompts wait already")
                asked = self._asked[name] = AskedPrompt(ids, takers)
                self._queue.append(name)
                self._change.notify_all()
            elif not torch.equal(asked.ids, ids):
                raise ArgumentError("prompt", "the tokens it was asked with before, or another name", name)
            asked.here += 1
            return asked

    def leave(self, asked: AskedPrompt) -> None:
        """Who asked has what he wanted, or is gone."""
        with self._change:
            asked.here, asked.gone, asked.left = asked.here - 1, asked.gone + 1, time.monotonic()
            self._change.notify_all()

    def next(self, key: int, patience: float) -> AskedPrompt | None:
        """The prompt that came first, under that number from now on; None: there is none after some seconds, or some
        are to be forgotten."""
        with self._change:
            if not self._queue and not self._to_forget():
                self._change.wait(patience)
            self._give_up()
            if not self._queue:
                return None
            asked = self._asked[self._queue.pop(0)]
            asked.key = key
            return asked

    def finish(self, asked: AskedPrompt, parcels: Sequence[dict[str, Any]] = (), error: str | None = None) -> None:
        """What became of a prompt."""
        with self._change:
            asked.parcels, asked.error = parcels, error
        asked.done.set()

    def forget(self) -> list[int]:
        """Numbers of prompts whose memory nobody needs any more; they are forgotten here."""
        with self._change:
            names = self._to_forget()
            gone = [self._asked.pop(name) for name in names]
        return [asked.key for asked in gone if asked.parcels]

    def close(self, why: str) -> None:
        """Take no more, and fail all that are not read."""
        with self._change:
            self._closed = True
            left, self._queue = list(self._asked.values()), []
            self._change.notify_all()
        for asked in left:
            if not asked.done.is_set():
                self.finish(asked, error=why)

    def _give_up(self) -> None:
        """What nobody waits for any more makes room: who asks again is read anew."""
        for name in [name for name in self._queue if not self._asked[name].here]:
            self._queue.remove(name)
            del self._asked[name]

    def _to_forget(self) -> list[str]:
        ready = (name for name, asked in self._asked.items() if asked.done.is_set() or asked.gone >= asked.takers)
        return [name for name in ready if self._asked[name].unwanted() and name not in self._queue]
