"""Beside an engine, on every rank: do the others live, do they get on, has one been told to stop, does a piece outlive
its time?

Threads do this, by way of the job's store, so it needs no turn of the engine's, which may be reading a piece for
minutes. A process that was stopped (SIGSTOP, a debugger, a host that swaps) gives no sign of life any more. One that
lives and is stuck in its model is waited for by the others: each says for how long it has waited for a message, and
who waits for none is whom they wait for.
"""

from __future__ import annotations

import signal
import threading
import time

from ..checks import check_kind
from ..context import ContextParallel
from .engine import Engine

BEAT = 0.5
"""Seconds between two signs of life."""
GRACE = 1.0
"""Seconds that a piece may go on after requests under way have had their time."""


class Lookout:
    """On every rank, in the main thread, around its engine's `run`. That thread gets a SIGALRM when a stopped engine is
    kept by a piece; its handler raises `Overdue`.

        with Lookout(engine, cp):
            engine.run()

    Args:
        engine: a stop of one is taken to all, at once. cp: its ranks; None: this process alone.
    """

    def __init__(self, engine: Engine, cp: ContextParallel | None) -> None:
        check_kind("engine", engine, Engine)
        check_kind("cp", cp, ContextParallel, optional=True)
        self._engine = engine
        self._leaves = threading.Event()
        self._comm = None if cp is None or cp.size == 1 else cp.comm
        self._groups = [] if self._comm is None else [self._comm, engine.ranks.comm]
        self._heard: dict[int, tuple[bytes, float]] = {}  # what other ranks said last, and when that was new
        self._threads = [threading.Thread(target=self._hurry, name="lookout", daemon=True)]
        if self._comm is not None:
            self._threads.append(threading.Thread(target=self._beat, name="pulse", daemon=True))

    def stalled(self, patience: float) -> dict[str, dict[int, float]]:
        """On rank 0: ranks that gave no sign of life for more than `patience` seconds, and, where a rank has waited so
        long for a message, those that wait for none; nothing where all get on."""
        now, found = time.monotonic(), dict[str, dict[int, float]]()
        silent = {rank: round(now - when, 1) for rank, (_, when) in self._heard.items() if now - when > patience}
        if silent:
            found["silent_ranks"] = silent
        told = {rank: said.split()[1:] for rank, (said, _) in self._heard.items()} | {0: self._waits().split()}
        longest = max((float(seconds) for [seconds] in filter(None, told.values())), default=0.0)
        if longest > patience:
            found["awaited_ranks"] = {rank: longest for rank, waits in told.items() if not waits}
        return found

    def _waits(self) -> str:
        """Seconds for which this rank's engine has waited for the message it waits for; empty: it waits for none."""
        since = [start for start in (group.waits_since for group in self._groups) if start is not None]
        return f"{time.monotonic() - min(since):.1f}" if since else ""

    def __enter__(self) -> Lookout:
        self._main = threading.get_ident()
        if self._comm is not None and self._comm.rank == 0:
            self._heard = {rank: (b"", time.monotonic()) for rank in range(1, self._comm.size)}
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaves.set()
        for thread in self._threads:
            thread.join(4 * BEAT)

    def _beat(self) -> None:
        """Signs of life, and the news that a rank was told to stop."""
        store, beats = self._comm.store.of("pulse"), 0
        try:
            while not self._leaves.wait(BEAT):
                beats += 1
                store.set(str(self._comm.rank), f"{beats} {self._waits()}")
                if self._engine.stopping:
                    store.set("stop", "")
                elif store.check(["stop"]):
                    self._engine.stop()
                for rank, (before, _) in self._heard.items():
                    said = store.get(str(rank)) if store.check([str(rank)]) else b""
                    if said != before:
                        self._heard[rank] = said, time.monotonic()
        except RuntimeError:  # the store is gone, with its host; the engine hears of that in its own exchange
            return

    def _hurry(self) -> None:
        """Signal the main thread once it is late."""
        while not self._leaves.wait(BEAT / 2):
            if self._engine.late(GRACE):
                signal.pthread_kill(self._main, signal.SIGALRM)
                return
