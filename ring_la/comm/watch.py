"""Which peer is late or gone: what makes of a failed or missing message an error that names the rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import PeerError
from .members import JobStore, Members

GRACE = 5.0
"""Seconds in which a rank that is alive reports a failure that all must see, at most."""


class PeerWatch:
    """Names the ranks behind a failure; one for each group."""

    def __init__(self, members: Members, store: JobStore) -> None:
        self._members, self._store = members, store
        self._failures = 0

    def refuse_late(self, what: str, late: Sequence[int]) -> None:
        """Raise a `PeerError` that names ranks whose messages did not come in time, if there are any."""
        if late:
            who, names = self._who(), self._members.names(late)
            raise PeerError(f"{who} before {what}: no message from {names} in time")

    def error(self, what: str, cause: Exception) -> PeerError:
        """Names the ranks that did not report this failure too: they died or stalled."""
        missing = self._silent()
        names = self._members.names(missing)
        culprit = f"no sign of life from {names}" if missing else "every rank reports the same failure"
        return PeerError(f"{self._who()} failed while {what}: {culprit}. Cause: {str(cause).splitlines()[0]}")

    def _who(self) -> str:
        return f"rank {self._members.rank} of {self._members.size}"

    def _silent(self) -> list[int]:
        """Ranks that do not write to the job's store within a few seconds of this failure, the n-th here and there."""
        m = self._members
        try:
            store = self._store.of(f"failed/{self._failures}")
            self._failures += 1
            store.set(str(m.rank), "failed")
            grace = min(GRACE, m.timeout.total_seconds())
            deadline, missing = time.monotonic() + grace, [r for r in range(m.size) if r != m.rank]
            while missing and time.monotonic() < deadline:
                missing = [r for r in missing if not store.check([str(r)])]
                time.sleep(0.02)
            return missing
        except Exception:  # the store itself is gone: its host, global rank 0, is
            return [m.global_ranks.index(0)] if 0 in m.global_ranks else []
