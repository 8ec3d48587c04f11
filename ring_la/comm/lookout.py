"""On GPUs, beside a rank's calls: messages that will not come are given up.

A host that gives its work to NCCL waits for nothing, and one that waits for its GPU sees nothing: where another rank
came to another call, died or does not come, such a rank would wait until the process group's own watchdog ends the
process. A thread looks at the log of calls instead. Where that says that messages of this rank cannot come any more, or
nobody has moved for the group's timeout while the device is at work, or a rank of this host has ended that had come to
more calls and the device has not been idle for `AHEAD` seconds since, it aborts them, so that the host goes on, and the
next call of the rank raises why. What the host read of the device in between is of no use. Messages through mailboxes
end by themselves, at the group's timeout.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable

import torch

from .calls import CallLog

PAUSE = 0.1
"""Seconds between two looks."""
SETTLE = 1.0
"""Seconds in which a rank whose host does not wait finds out by itself."""
AHEAD = 30.0
"""Seconds, or the group's timeout if that is less, for which a device may be at work, without a pause, after a rank of
this host has ended that had come to all calls: what it had sent may be on its way, or be waited for without end."""

log_of_events = logging.getLogger("ring_la")


def look_out(log: CallLog, abort: Callable[[], None], busy: Callable[[], bool]) -> None:
    """Watch the calls of this rank, in a thread, as long as the log is there.

    Args:
        abort: ends the messages under way, whose ranks the log is of. busy: whether the device has work that has not
            ended; asked when this rank and those it is ahead of have not moved for the group's timeout.
    """
    threading.Thread(target=_watch, args=(weakref.ref(log), abort, busy), name="ring_la calls", daemon=True).start()


def device_busy(device: torch.device, *streams: torch.cuda.Stream | None) -> bool:
    """Whether the default stream or one of these has work that has not ended; False where one is being captured."""
    for stream in (torch.cuda.default_stream(device), *filter(None, streams)):
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return False
        if not stream.query():
            return True
    return False


class _Since:
    """How long an answer has been the same."""

    def __init__(self) -> None:
        self._last: object = None
        self._began = 0.0

    def __call__(self, answer: object) -> float:
        """Seconds; 0 where the answer is None, or new."""
        now = time.monotonic()
        if answer is None or answer != self._last:
            self._last, self._began = answer, now
        return now - self._began


def _watch(ref: weakref.ref[CallLog], abort: Callable[[], None], busy: Callable[[], bool]) -> None:
    lost, still, at_work = _Since(), _Since(), _Since()
    while (log := ref()) is not None:
        why, behind = log.hopeless(), log.behind()
        given_up = lost(None if why is None else True) > SETTLE
        waited = still(behind)
        if waited > log.patience:
            log.ask_elsewhere()
        if not given_up and waited > log.patience + SETTLE and busy():
            why, given_up = functools.partial(log.too_late, behind), True
        died = None if given_up else log.died()
        if at_work(True if died is not None and busy() else None) > min(AHEAD, log.patience):
            why, given_up = log.died, True
        if given_up and why is not None:
            error = why()
            log.give_up(error)
            log_of_events.error("messages under way are aborted: %s: %s", type(error).__name__, error)
            abort()
            return
        del log, why  # the log may go
        time.sleep(PAUSE)
