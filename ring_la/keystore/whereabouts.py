"""Where a rank has which tokens of sequences side by side: tables on the device that chosen keys are looked up in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .pages import Held
from .store import KeyRows


class Whereabouts(NamedTuple):
    """Where a rank has the tokens of some sequences, for all layers: a row a sequence, filled up with what is empty.

    Attributes:
        start, stop, step, before: of the runs of positions, and how many tokens stand before each, int64 ``[N, R]``.
        slab, row, first: of the runs of memory ``[N, E]``: the slab, the row there, and how many tokens stand before.
    """

    start: Tensor
    stop: Tensor
    step: Tensor
    before: Tensor
    slab: Tensor
    row: Tensor
    first: Tensor

    @classmethod
    def of(cls, rows: KeyRows) -> Whereabouts:
        """Of sequences side by side, made once a step."""
        return rows.kept(cls, lambda: cls(*_table([_runs(x) for x in rows.held], 4, rows), *_memory(rows)))

    def rows_of(self, places: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Of places ``[N, M]`` the numbers of the tokens on this rank, and which of them it has."""
        at, far = places[..., None], length[:, None, None]
        start, stop, step = (x[:, None] for x in (self.start, self.stop, self.step))
        inside = (at >= start) & (at < stop) & (at < far) & ((at - start) % step == 0)
        number = self.before[:, None] + (at - start) // step
        return torch.where(inside, number, 0).sum(-1), inside.any(-1)

    def places_of(self, numbers: Tensor) -> Tensor:
        """Of numbers ``[N, M]`` of tokens on this rank their places."""
        run = torch.searchsorted(self.before, numbers, right=True) - 1
        start, step, before = (x.gather(1, run) for x in (self.start, self.step, self.before))
        return start + (numbers - before) * step

    def memory_of(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Of numbers ``[N, M]`` the slab and the row of each token."""
        run = torch.searchsorted(self.first, numbers, right=True) - 1
        slab, row, first = (x.gather(1, run) for x in (self.slab, self.row, self.first))
        return slab, row + numbers - first


def _runs(held: Held) -> list[tuple[int, ...]]:
    """Start, stop and step of each run of positions, and the tokens before it."""
    out: list[tuple[int, ...]] = []
    before = 0
    for run in held.runs:
        out.append((run.start, run.stop, run.step, before))
        before += len(run)
    return out


def _memory(rows: KeyRows) -> list[Tensor]:
    """Slab, row and the tokens before it of each run of memory."""
    entries = []
    for held in rows.held:
        mine, before = [], 0
        for span in held.spans(0, held.here):
            mine.append((span.slab, span.start, before))
            before += span.stop - span.start
        entries.append(mine)
    return _table(entries, 3, rows)


def _table(entries: Sequence[Sequence[tuple[int, ...]]], fields: int, rows: KeyRows) -> list[Tensor]:
    """Each field of the entries ``[N, ·]``. Those that are not there begin after all tokens, and hold nothing."""
    most, end = max(1, *map(len, entries)), 1 << 60
    empty = (end, 0, 1, end) if fields == 4 else (-1, 0, end)
    filled = [[*mine, *[empty] * (most - len(mine))] for mine in entries]
    if any(not mine for mine in entries):  # a number is looked up where there is no run
        filled = [row if mine else [(*empty[:-1], 0), *row[1:]] for mine, row in zip(entries, filled)]
    return [x.contiguous() for x in torch.tensor(filled, device=rows.store.device).unbind(-1)]
