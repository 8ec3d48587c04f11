"""Attention over this rank's tokens and everybody's keys, of which a mask leaves some out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...context import ShardedLayout
from ...errors import ArgumentError, UnsupportedError
from ...softmax import attention
from .plans import Mask
from .streams import Streams


class Kept(NamedTuple):
    """The keys that some batch rows see.

    Attributes:
        rows: these batch rows.
        index: the keys among this rank's.
        layout: of the keys.
    """

    rows: Tensor
    index: Tensor
    layout: ShardedLayout


class Keys:
    """Which keys the blocks of one call see. A mask reads the same for every query, so masked keys are left out."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._mask: Tensor | None = None
        self._kept: dict[tuple[str, ...], list[Kept] | None] = {}

    def set(self, name: str, mask: Tensor | None, role: Mask, order: tuple[str, ...]) -> None:
        """Take a block's mask, whole, for attention over the streams of `order`. Waits for the device where the mask
        is another one than before."""
        if mask is self._mask:
            return
        self._mask, self._kept = mask, {}
        if mask is None:
            return
        sizes = self.streams.sizes
        count = sum(sizes[s] for s in role.streams)
        if mask.is_floating_point() or mask.shape[-1] != count or mask.numel() != len(mask) * count:
            expected = f"bool or int, [B, {count}], the same for every query"
            raise ArgumentError(name, expected, f"{mask.dtype} {list(mask.shape)}")
        given = dict(
            zip(role.streams, mask.reshape(len(mask), count).bool().cpu().split([sizes[s] for s in role.streams], 1))
        )
        seen = torch.cat([given.get(s, torch.ones(len(mask), sizes[s], dtype=torch.bool)) for s in order], 1)
        if bool(seen.all()):
            return
        if not bool(seen.any(1).all()):
            raise ArgumentError(name, "a key to see in every batch row", "a row without")
        ranks, cp = self.streams.ranks_of(order), self.streams.cp
        self._kept[order] = []
        for row in torch.unique(seen, dim=0):
            counts = torch.bincount(ranks[row], minlength=cp.size).tolist()
            rows = (seen == row).all(1).nonzero().flatten()
            index = row[ranks == cp.rank].nonzero().flatten()
            self._kept[order].append(Kept(rows.to(cp.device), index.to(cp.device), self.streams.cut(counts)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, order: tuple[str, ...], scale: float | None, backend: str | None):
        """``[B, T, H, D]`` of this rank's tokens of the streams of `order`."""
        layout = self.streams.together(order)
        how = dict(causal=False, scale=scale, layout=layout, backend=backend)
        if q.shape[1] != k.shape[1]:
            raise UnsupportedError("key", f"as many tokens as query, {q.shape[1]}", k.shape[1])
        kept = self._kept.get(order)
        if kept is None:
            return attention(q, k, v, **how).o
        if len(kept) == 1:
            return attention(q, k[:, kept[0].index], v[:, kept[0].index], kv_layout=kept[0].layout, **how).o
        parts = [
            attention(q[one.rows], *(x[one.rows][:, one.index] for x in (k, v)), kv_layout=one.layout, **how).o
            for one in kept
        ]
        return torch.cat(parts)[torch.argsort(torch.cat([one.rows for one in kept]))]
