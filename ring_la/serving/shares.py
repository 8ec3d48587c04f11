"""Which rank read, and which rank holds, which tokens of a request: what `GET /shares/ID` says."""

from __future__ import annotations

from typing import Any

from ..context import CANONICAL_CHUNK
from ..layout import Layout
from .completion import Trail
from .engine import Engine

Runs = list[tuple[int, int]]
"""Runs of tokens, each ``(first, one after the last)``."""


def shares(engine: Engine, trail: Trail) -> dict[str, Any]:
    """What each rank did for a request, rank by rank.

    Tokens are counted from the prompt's first. "read": those a rank read, the prompt's split over the ranks and those
    decoded by rank 0. "held": those whose states it has now: rank 0 all of them as long as the request is under way,
    every rank those that are kept for prompts that begin alike.
    """
    ranks = 1 if engine.cp is None else engine.cp.size
    total = trail.tokens + trail.decoded
    kept = trail.kept[1] if trail.kept[0] in engine.states.kept else 0
    reading: list[Runs] = [[] for _ in range(ranks)]
    for begin, end in list(trail.pieces):
        for rank, runs in enumerate(_split(engine, end - begin, ranks)):
            reading[rank] += [(begin + a, begin + b) for a, b in runs]
    if trail.decoded:
        reading[0].append((trail.tokens, total))
    read = max((end for runs in reading for _, end in runs), default=trail.reused)
    holding = [[(0, n)] if n else [] for n in (read if not trail.ended else kept, *[kept] * (ranks - 1))]
    return {
        "object": "shares",
        "ranks": ranks,
        "prompt_tokens": trail.tokens,
        "cached_tokens": trail.reused,
        "completion_tokens": trail.decoded,
        "ended": trail.ended,
        "read": [_joined(runs) for runs in reading],
        "held": holding,
    }


def _split(engine: Engine, length: int, ranks: int) -> list[Runs]:
    """Each rank's runs of a piece of so many tokens."""
    multiple = CANONICAL_CHUNK if engine.cp is not None and engine.cp.deterministic else 1  # as `cp.layout` has it
    layout = Layout(length, engine.model.kind, ranks, multiple_of=multiple)
    if not engine.model.flexible and min(layout.lengths) == 0:  # read whole by every rank
        return [[(0, length)]] * ranks
    runs: list[Runs] = [[] for _ in range(ranks)]
    for segment in layout.segments:
        runs[segment.owner].append((segment.start, segment.stop))
    return runs


def _joined(runs: Runs) -> Runs:
    """Runs in order, those that meet as one."""
    joined: Runs = []
    for begin, end in sorted(runs):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
