"""Beside an engine, on every rank: do the others live, has one been told to stop, does a piece outlive its time?

Threads do this, so it needs no turn of the engine's, which may be reading a piece for minutes. A process that was
stopped (SIGSTOP, a debugger, a host that swaps) answers no more: `Watch.silence` says since when.
"""

from __future__ import annotations

import signal
import threading
import time

import torch
import torch.distributed as dist

from ..comm import Group
from ..context import ContextParallel
from ..errors import RingLAError
from .engine import Engine

BEAT = 0.5
"""Seconds between two signs of life."""
GRACE = 1.0
"""Seconds that a piece may go on after requests under way have had their time."""
GOES_ON, STOPS, LEAVES = range(3)


class Watch:
    """Collective: every rank makes one around its engine's `run`, in its main thread.

        with Watch(engine, cp):
            engine.run()

    Args:
        engine: a stop of one is taken to all, at once. cp: its ranks; None: this process alone.
        late: a signal to the main thread when a stopped engine is kept by a piece; its handler raises `Overdue`.
    """

    def __init__(self, engine: Engine, cp: ContextParallel | None, late: int = signal.SIGALRM) -> None:
        self._engine, self._late = engine, late
        self._heard = time.monotonic()
        self._leaves, self._ended = threading.Event(), threading.Event()
        self._group: Group | None = None
        if cp is not None and cp.size > 1:
            ranks = sorted(cp.comm.global_ranks)
            local = len(ranks) < dist.get_world_size()
            group = dist.new_group(ranks, backend="gloo", timeout=cp.timeout, use_local_synchronization=local)
            self._group = Group(group, cp.timeout, "torch")
        self._threads = [threading.Thread(target=self._hurry, name="watch", daemon=True)]
        if self._group is not None:
            self._threads.append(threading.Thread(target=self._beat, name="pulse", daemon=True))

    @property
    def silence(self) -> float:
        """Seconds since all ranks gave a sign of life."""
        return 0.0 if self._group is None else time.monotonic() - self._heard

    def __enter__(self) -> Watch:
        self._main = threading.get_ident()
        self._heard = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaves.set()
        for thread in self._threads:
            thread.join(4 * BEAT)

    def _beat(self) -> None:
        """Signs of life, until a rank leaves, or one does not answer any more."""
        try:
            while True:
                leaves = self._leaves.wait(BEAT)
                mine = LEAVES if leaves else STOPS if self._engine.stopping else GOES_ON
                all_ = self._group.all_gather(torch.tensor([mine])).wait()
                self._heard = time.monotonic()
                if bool((all_ != GOES_ON).any()):
                    self._engine.stop()
                if bool((all_ == LEAVES).any()):
                    return
        except RingLAError:
            return  # the engine hears of it in its own exchange; `silence` grows

    def _hurry(self) -> None:
        """Signal the main thread once it is late."""
        while not self._leaves.wait(BEAT / 2):
            if self._engine.late(GRACE):
                signal.pthread_kill(self._main, self._late)
                return
