"""Which tiles of queries and keys meet, as lists for the kernels. On the device, without a synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...scores import Scores
from ...tokens import ANY_DOCUMENT, Tokens


class TileLists(NamedTuple):
    """For each tile of one side the tiles of the other it meets.

    Attributes:
        tiles: int32 ``[n, m]``, row i: first tiles that are seen whole, then those on a border.
        counts: int32 ``[n, 2]``, how many are whole, and how many in all.
    """

    tiles: Tensor
    counts: Tensor


def of_queries(scores: Scores, tq: Tokens, tk: Tokens, bm: int, bn: int) -> TileLists:
    """For each tile of `bm` queries the tiles of `bn` keys it meets; made once for two sides, a mask and a size."""
    kept, key = tq.tiles.setdefault(tk, {}), ("queries", scores.left, scores.right, bm, bn)
    if key not in kept:
        kept[key] = _lists(*_meet(scores, tq, tk, bm, bn))
    return kept[key]


def of_keys(scores: Scores, tq: Tokens, tk: Tokens, bm: int, bn: int) -> TileLists:
    """For each tile of `bn` keys the tiles of `bm` queries it meets."""
    kept, key = tq.tiles.setdefault(tk, {}), ("keys", scores.left, scores.right, bm, bn)
    if key not in kept:
        seen, whole = _meet(scores, tq, tk, bm, bn)
        kept[key] = _lists(seen.T, whole.T)
    return kept[key]


def columns(t: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """(position, document, index) of each row, int32."""
    if "_int32" not in t.__dict__:
        t.__dict__["_int32"] = tuple(x.to(torch.int32).contiguous() for x in (t.positions, t.documents, t.index))
    return t.__dict__["_int32"]


def _meet(scores: Scores, tq: Tokens, tk: Tokens, bm: int, bn: int) -> tuple[Tensor, Tensor]:
    """Bool ``[tiles of tq, tiles of tk]``: whether any pair may be seen, and whether all are."""
    q_pos, q_doc = _ranges(tq.positions, bm), _ranges(tq.documents, bm)
    k_pos, k_doc = _ranges(tk.positions, bn), _ranges(tk.documents, bn)
    nearest = k_pos[0][None] - q_pos[1][:, None]
    farthest = k_pos[1][None] - q_pos[0][:, None]
    anyone = (k_doc[0] == ANY_DOCUMENT)[None]
    seen = anyone | ((k_doc[0][None] <= q_doc[1][:, None]) & (k_doc[1][None] >= q_doc[0][:, None]))
    alone = (q_doc[0] == q_doc[1])[:, None] & (k_doc[0] == k_doc[1])[None] & (q_doc[0][:, None] == k_doc[0][None])
    whole = alone | (anyone & (k_doc[1] == ANY_DOCUMENT)[None])
    if scores.right is not None:
        seen, whole = seen & (nearest <= scores.right), whole & (farthest <= scores.right)
    if scores.left is not None:
        seen, whole = seen & (farthest >= -scores.left), whole & (nearest >= -scores.left)
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
