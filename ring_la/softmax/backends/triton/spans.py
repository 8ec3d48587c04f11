"""Spans: the keys that each query of a block sees where they lie one after the other, and programs' shares of them.

    query at position p of document d:   keys of d at positions  p − left … p + right

Keys in the order of documents and positions, as every split has them, make that one run of rows of the block, found by
a binary search; so do the queries that see a key. On the device, without a synchronisation; the host knows documents'
borders, where tiles begin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry import Pair, Tokens, once
from ...scores import Scores

ALONE = 512
"""Rows of a document that has tiles of its own; those of shorter ones are shared."""
FAR = 1 << 31
BOUNDARY = 4
"""Rows that begin on 16 bytes of fp32: where walks over numbers of queries begin."""


class SpanWork(NamedTuple):
    """What programs do, the dearest first.

    Attributes:
        items: int32 ``[n, 6]``: an item's first row and the one behind its last, where its walk over the other side
            begins, the tiles of that which are seen whole (the first, and the one behind the last) and how many there
            are in all.
        low, high: int32 ``[T]``: of each row, the first of the other side it sees and the one behind the last.
    """

    items: Tensor
    low: Tensor
    high: Tensor


def simple(pair: Pair, scores: Scores) -> bool:
    """Whether spans are all there is to these scores."""
    return scores.beyond <= {"sums"} and pair.rows.rising and pair.keys.rising


@once
def of_queries(pair: Pair, rows: int, keys: int) -> SpanWork:
    """Items of at most `rows` queries, which walk tiles of `keys` keys."""
    return work_of(pair.rows, spans_of(pair.rows, pair.keys, *pair.reach), rows, keys, 1)


@once
def of_keys(pair: Pair, rows: int, keys: int) -> SpanWork:
    """Items of at most `keys` keys, which walk tiles of `rows` queries."""
    left, right = pair.reach
    return work_of(pair.keys, spans_of(pair.keys, pair.rows, right, left), keys, rows, BOUNDARY)


def spans_of(rows: Tokens, others: Tokens, back: int | None, ahead: int | None) -> tuple[Tensor, Tensor]:
    """Of each row the first of the others it sees, and the one behind the last."""
    places = (others.documents * (2 * FAR) + others.positions).contiguous()  # rises, as the rows do
    first = -FAR + 1 if back is None else rows.positions - back
    last = FAR - 1 if ahead is None else rows.positions + ahead
    document = rows.documents * (2 * FAR)
    low = torch.searchsorted(places, (document + first).contiguous())
    high = torch.searchsorted(places, (document + last).contiguous(), right=True)
    return low.to(torch.int32), high.to(torch.int32)


def work_of(rows: Tokens, spans: tuple[Tensor, Tensor], size: int, step: int, boundary: int) -> SpanWork:
    """Items of at most `size` rows with spans of the other side, which walk tiles of `step` of it from a multiple of
    `boundary` on."""
    low, high = spans
    cuts = torch.tensor(_cuts(rows, size), dtype=torch.int32, device="cpu").to(low.device)
    inside = cuts[:, :1] + torch.arange(size, device=low.device, dtype=torch.int32)
    mine = inside < cuts[:, 1:]
    inside = inside.clamp(max=len(rows) - 1).long()
    first, last = low[inside], high[inside]
    sees = mine & (last > first)
    start = torch.where(sees, first, FAR // 2).amin(1) // boundary * boundary
    stop = torch.where(sees, last, 0).amax(1)
    count = ((stop - start).clamp(min=0) + step - 1) // step
    start = torch.where(count > 0, start, 0)
    from_all = torch.where(mine, torch.where(sees, first, FAR // 2), 0).amax(1)
    to_all = torch.where(mine, torch.where(sees, last, 0), FAR // 2).amin(1)
    whole = (from_all - start + step - 1) // step
    until = (to_all - start) // step
    none = until <= whole
    whole, until = (torch.where(none, count, x) for x in (whole, until))
    items = torch.stack([cuts[:, 0], cuts[:, 1], start, whole, until, count], 1)
    order = torch.argsort(count, descending=True, stable=True)
    return SpanWork(items[order].to(torch.int32).contiguous(), low, high)


def _cuts(tokens: Tokens, size: int) -> list[tuple[int, int]]:
    """Rows of each item: of one long document, or of short ones in turn; any, where only the device knows these."""
    if tokens.runs is None:
        return [(at, min(at + size, len(tokens))) for at in range(0, len(tokens), size)]
    stretches: list[list] = []
    for r in tokens.runs:
        if stretches and stretches[-1][2] == r.document:
            stretches[-1][1] += r.length
        else:
            stretches.append([r.offset, r.offset + r.length, r.document])
    joined: list[list[int]] = []
    previous_long = True
    for a, b, _ in stretches:
        long = b - a >= ALONE
        if joined and not long and not previous_long:
            joined[-1][1] = b
        else:
            joined.append([a, b])
        previous_long = long
    return [(at, min(at + size, b)) for a, b in joined for at in range(a, b, size)]
