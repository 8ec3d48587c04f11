"""Requests to an engine on CPUs, and what they heard."""

from __future__ import annotations

from collections.abc import Sequence

from ring_la.serving import Engine, Event, Job, Piece, Request

LONG = 60.0


class Asked(Job):
    """A request, and what it heard."""

    def __init__(self, ids: Sequence[int], max_tokens: int = 4, **options) -> None:
        self.events: list[Event] = []
        super().__init__(Request(list(ids), max_tokens, **options), self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [e.token for e in self.events if isinstance(e, Piece)]


def serve(engine: Engine, jobs: Sequence[Job]) -> None:
    """Answer all of them, then stop."""
    if engine.ranks.leads:
        for job in jobs:
            engine.submit(job)
        engine.stop()
    engine.run()
