"""On GPUs, beside a rank's calls: messages that will not come are given up.

A host that gives its work to NCCL waits for nothing, and one that waits for its GPU sees nothing: where another rank
came to another call, or died, such a rank would wait until the process group's own watchdog ends the process. A thread
looks at the log of calls instead. Where that says that messages of this rank cannot come any more, it aborts them, so
that the host goes on, and the next call of the rank raises why. What the host read of the device in between is of no
use. Messages through mailboxes end by themselves, at the group's timeout.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from .calls import CallLog

PAUSE = 0.1
"""Seconds between two looks."""
SETTLE = 1.0
"""Seconds in which a rank whose host does not wait finds out by itself."""

log_of_events = logging.getLogger("ring_la")


def look_out(log: CallLog, abort: Callable[[], None]) -> None:
    """Watch the calls of this rank, in a thread, as long as the log is there.

    Args:
        abort: ends the messages under way, whose ranks the log is of.
    """
    threading.Thread(target=_watch, args=(weakref.ref(log), abort), name="ring_la calls", daemon=True).start()


def _watch(ref: weakref.ref[CallLog], abort: Callable[[], None]) -> None:
    since = None
    while (log := ref()) is not None:
        why = log.hopeless()
        if why is None:
            since = None
        elif since is None:
            since = time.monotonic()
        elif time.monotonic() - since > SETTLE:
            error = why()
            log.give_up(error)
            log_of_events.error("messages under way are aborted: %s: %s", type(error).__name__, error)
            abort()
            return
        del log, why  # the log may go
        time.sleep(PAUSE)
