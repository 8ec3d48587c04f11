"""Which rank read, and which rank holds, which tokens of a request: what `GET /shares/ID` says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..context import CANONICAL_CHUNK
from ..layout import Layout
from .completion import Trail
from .engine import Engine

Runs = list[tuple[int, int]]
"""Runs of tokens, each ``(first, one after the last)``."""


def shares(engine: Engine, trail: Trail) -> dict[str, Any]:
    """What each rank did for a request, rank by rank.

    Tokens are counted from the prompt's first. "read": those a rank read: of the prompt its share, of those decoded
    all, or none where rank 0 decodes alone. "held": those whose states it has now. Where keys stay on the rank that
    read them, a rank has those, and of tokens that all read, decoded ones among them, every P-th. Else rank 0, or every
    rank that decodes, has all as long as the request is under way, and every rank those that are kept for prompts that
    begin alike.
    """
    ranks, shared = 1 if engine.cp is None else engine.cp.size, engine.states.shared
    together = engine.states.together
    total = trail.tokens + trail.decoded
    kept = trail.kept[1] if trail.kept[0] in engine.states.kept else 0
    reading = _of_pieces(engine, trail.pieces, ranks)
    holding = _of_pieces(engine, (*trail.before, *trail.pieces), ranks, kept=True)
    read = max((end for runs in reading for _, end in runs), default=trail.reused)
    for rank, runs in enumerate(reading):
        if trail.decoded and (together or rank == 0):
            runs.append((trail.tokens, total))
    if not shared:
        others = kept if trail.ended or not together else read
        holding = [[(0, n)] if n else [] for n in (kept if trail.ended else read, *[others] * (ranks - 1))]
    elif trail.ended:
        holding = [[(begin, min(end, kept)) for begin, end in runs if begin < kept] for runs in holding]
    else:
        for runs, more in zip(holding, _in_turn(trail.tokens, total, ranks), strict=True):
            runs += more
    return {
        "object": "shares",
        "ranks": ranks,
        "prompt_tokens": trail.tokens,
        "cached_tokens": trail.reused,
        "completion_tokens": trail.decoded,
        "ended": trail.ended,
        "read": [_joined(runs) for runs in reading],
        "held": [_joined(runs) for runs in holding],
    }


def _of_pieces(engine: Engine, pieces: Iterable[tuple[int, int]], ranks: int, kept: bool = False) -> list[Runs]:
    """Each rank's runs of pieces that were read one after the other; `kept`: those whose keys stay with it."""
    of_ranks: list[Runs] = [[] for _ in range(ranks)]
    for begin, end in pieces:
        split = _split(engine, begin, end - begin, ranks)
        whole = ranks > 1 and all(runs == [(0, end - begin)] for runs in split)
        of_piece = [[(begin + a, begin + b) for a, b in runs] for runs in split]
        for runs, more in zip(of_ranks, _in_turn(begin, end, ranks) if whole and kept else of_piece, strict=True):
            runs += more
    return of_ranks


def _split(engine: Engine, begin: int, length: int, ranks: int) -> list[Runs]:
    """Each rank's runs of a piece of so many tokens that begins there."""
    multiple = CANONICAL_CHUNK if engine.cp is not None and engine.cp.deterministic else 1  # as `cp.layout` has it
    layout = Layout(length, engine.model.kind, ranks, multiple_of=multiple)
    if engine.model.whole(begin, layout.lengths):
        return [[(0, length)]] * ranks
    runs: list[Runs] = [[] for _ in range(ranks)]
    for segment in layout.segments:
        runs[segment.owner].append((segment.start, segment.stop))
    return runs


def _in_turn(begin: int, end: int, ranks: int) -> list[Runs]:
    """Of each rank its tokens from one on, which go to the ranks in turn."""
    return [[(at, at + 1) for at in range(begin + (rank - begin) % ranks, end, ranks)] for rank in range(ranks)]


def _joined(runs: Runs) -> Runs:
    """Runs in order, those that meet as one."""
    joined: Runs = []
    for begin, end in sorted(runs):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
