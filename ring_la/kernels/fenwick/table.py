"""What programs know of the chunks of a call: one row a chunk, in the order of the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ring_la.kept import recent

COLUMNS = 8
"""First token of the chunk (of its whole place: it may lie before the run), first of the run, end of the run, the
chunk's number m in its document, that of the run's first and last chunk, the level of node m above the first, and the
row of the n-th largest node."""


@recent(256)
def table_of(runs: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Tensor, int]:
    """(rows ``[R, COLUMNS]`` int32, levels above chunks) of runs, three numbers each: start, stop, and the position of
    the start in its document."""
    rows = list(_rows(runs, chunk))
    sizes = [m & -m if m > first else 0 for _, _, _, m, first, _, _ in rows]
    order = sorted(range(len(rows)), key=sizes.__getitem__, reverse=True)
    levels = max((row[6] + 1 for row, size in zip(rows, sizes) if size), default=0)
    data = [(*row, largest) for row, largest in zip(rows, order)]
    return torch.tensor(data, dtype=torch.int32).reshape(-1, COLUMNS).to(device), levels


def _rows(runs: Sequence[int], chunk: int) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    for start, stop, position in zip(runs[::3], runs[1::3], runs[2::3]):
        origin = start - position
        first, last = position // chunk, (stop - 1 - origin) // chunk
        for m in range(first, last + 1):
            yield origin + m * chunk, start, stop, m, first, last, (m & -m).bit_length() - 1
