"""Which tiles of queries and keys meet, as lists for the kernels. On the device, without a synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry import ANY_DOCUMENT, Pair, once, tiles

ALIGNED = 128


class TileLists(NamedTuple):
    """For each tile of one side the tiles of the other it meets.

    Attributes:
        tiles: int32 ``[n, m]``, row i: first tiles that are seen whole, then those on a border.
        counts: int32 ``[n, 2]``, how many are whole, and how many in all.
    """

    tiles: Tensor
    counts: Tensor


class Trimmed(NamedTuple):
    """What is left of a block without the rows and keys, at either end, that meet nothing."""

    rows: slice
    keys: slice
    pair: Pair


@once
def trimmed(pair: Pair) -> Trimmed | None:
    """The part of a block that a call is made for; None: nothing meets."""
    tq, tk = pair.rows, pair.keys
    if tq.runs is None or tk.runs is None:
        return Trimmed(slice(0, len(tq)), slice(0, len(tk)), pair)
    seen = tiles(pair)
    if not seen:
        return None
    rows = _aligned(min(t.q0 for t in seen), max(t.q1 for t in seen), len(tq))
    keys = _aligned(min(t.k0 for t in seen), max(t.k1 for t in seen), len(tk))
    one, other = (t if r == slice(0, len(t)) else t.cut(r.start, r.stop) for t, r in ((tq, rows), (tk, keys)))
    return Trimmed(rows, keys, Pair(one, other, pair.reach))


def _aligned(start: int, stop: int, length: int) -> slice:
    """A stretch that begins, and but at the end of all ends, where every tile does."""
    return slice(start // ALIGNED * ALIGNED, min(length, -(-stop // ALIGNED) * ALIGNED))


@once
def of_queries(pair: Pair, bm: int, bn: int) -> TileLists:
    """For each tile of `bm` queries the tiles of `bn` keys it meets."""
    return _lists(*meet(pair, bm, bn))


@once
def of_keys(pair: Pair, bm: int, bn: int) -> TileLists:
    """For each tile of `bn` keys the tiles of `bm` queries it meets."""
    seen, whole = meet(pair, bm, bn)
    return _lists(seen.T, whole.T)


def meet(pair: Pair, bm: int, bn: int) -> tuple[Tensor, Tensor]:
    """Bool ``[tiles of tq, tiles of tk]``: whether any pair may be seen, and whether all are."""
    tq, tk, (left, right) = pair.rows, pair.keys, pair.reach
    q_pos, q_doc = _ranges(tq.positions, bm), _ranges(tq.documents, bm)
    k_pos, k_doc = _ranges(tk.positions, bn), _ranges(tk.documents, bn)
    nearest = k_pos[0][None] - q_pos[1][:, None]
    farthest = k_pos[1][None] - q_pos[0][:, None]
    anyone = (k_doc[0] == ANY_DOCUMENT)[None]
    seen = anyone | ((k_doc[0][None] <= q_doc[1][:, None]) & (k_doc[1][None] >= q_doc[0][:, None]))
    alone = (q_doc[0] == q_doc[1])[:, None] & (k_doc[0] == k_doc[1])[None] & (q_doc[0][:, None] == k_doc[0][None])
    whole = alone | (anyone & (k_doc[1] == ANY_DOCUMENT)[None])
    if right is not None:
        seen, whole = seen & (nearest <= right), whole & (farthest <= right)
    if left is not None:
        seen, whole = seen & (farthest >= -left), whole & (nearest >= -left)
    if len(tk) % bn:
        whole[:, -1] = False  # its last keys do not exist
    return seen, whole & seen


def _ranges(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each tile."""
    pad = -len(x) % size
    tiles = torch.cat([x, x[-1:].expand(pad)]).view(-1, size)
    return tiles.amin(1), tiles.amax(1)


def _lists(seen: Tensor, whole: Tensor) -> TileLists:
    rank = torch.where(whole, 0, torch.where(seen, 1, 2)).to(torch.int8)
    order = torch.argsort(rank, dim=1, stable=True).to(torch.int32).contiguous()
    counts = torch.stack([whole.sum(1), seen.sum(1)], 1).to(torch.int32).contiguous()
    return TileLists(order, counts)
