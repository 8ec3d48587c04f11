"""What a call raises, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ring_la


def caught(call: Callable[[], Any]) -> tuple[str, float]:
    """The error of ring_la's that a call raises, with its name, and seconds."""
    start = time.monotonic()
    try:
        call()
    except ring_la.RingLAError as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - start
    return "nothing raised", time.monotonic() - start
