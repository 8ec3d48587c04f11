"""Attention over this rank's tokens and everybody's keys, of which a mask leaves some out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...context import ContextParallel, ShardedLayout
from ...errors import ArgumentError, UnsupportedError
from ...outputs import AttentionOutput
from ...softmax import attention
from ...softmax.ahead import KeysAhead
from .streams import Layouts, Streams, counts, owners


class SeenKeys(NamedTuple):
    """The keys that some batch rows see.

    Attributes:
        rows: these batch rows.
        index: the keys among this rank's.
        layout: of the keys.
    """

    rows: Tensor
    index: Tensor  # type: ignore[assignment]
    layout: ShardedLayout


class RaisedKeys(NamedTuple):
    """The keys that some batch rows see, and whose scores are raised.

    Attributes:
        raised: those, for queries that have a 1 themselves. others: the rest; None: there is none, and where all scores
            are raised none is.
        queries: which of this rank's queries have a 1, ``[T]``, in fp32.
    """

    raised: SeenKeys
    others: SeenKeys | None
    queries: Tensor


class GivenMask(NamedTuple):
    """A mask as a block got it, the same for every query.

    Attributes:
        name: of the block's argument.
        mask: bool or int, ``[B, tokens]`` or with dimensions of size 1 between; 0 leaves a key out. Floats, 0 or 1,
            leave none out: the score of a query and a key that both have 1 is raised by 1.
        streams: whose tokens it has.
    """

    name: str
    mask: Tensor
    streams: tuple[str, ...]

    @classmethod
    def of(cls, mask: Tensor | None, streams: str) -> GivenMask | None:
        """As a registered operator has it."""
        return None if mask is None else cls("the mask of a block", mask, tuple(streams.split(",")))


class BlockKeys:
    """Which keys the blocks of one call see. Masked ones are left out: a mask reads the same for every query."""

    def __init__(self, cp: ContextParallel, layouts: Layouts, streams: Streams) -> None:
        self.cp, self.layouts, self.streams = cp, layouts, streams
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by mask, what it leaves of some streams

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        order: tuple[str, ...],
        sizes: Sequence[int],
        masked: GivenMask | None,
        scale: float | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """``[B, T, H, D]`` of this rank's tokens of the streams of `order`, which have `sizes` tokens; `options` of
        `ring_la.attention`. Waits for the device where the mask is another tensor than the last one."""
        q, k = qkv[:2]
        if q.shape[1] != k.shape[1]:
            raise UnsupportedError("key", f"as many tokens as query, {q.shape[1]}", k.shape[1])
        layout = self.layouts.of(counts(sizes, self.cp.size, self.streams.units(order)))
        how: dict[str, Any] = dict(causal=False, scale=scale, layout=layout, **options)
        if masked is not None and masked.mask.is_floating_point():
            return _attend_raised(qkv, self._seen(order, sizes, masked), how)
        return _attend_seen(qkv, self._seen(order, sizes, masked), how)

    def post(
        self,
        kv: tuple[Tensor, Tensor],
        order: tuple[str, ...],
        sizes: Sequence[int],
        masked: GivenMask | None,
        first: bool,
        options: Mapping[str, Any],
    ) -> KeysAhead | None:
        """Let keys and values go before their queries, which are like them; None where batch rows see other keys of
        each other, or a mask raises scores, and nothing has gone. `first`: of the call."""
        k, v = kv
        if masked is not None and masked.mask.is_floating_point():
            return None
        layout = self.layouts.of(counts(sizes, self.cp.size, self.streams.units(order)))
        kept = self._seen(order, sizes, masked)
        if kept is None:
            return KeysAhead(k, v, k, layout, first=first, **options)
        if len(kept) > 1:
            return None
        (one,) = kept
        return KeysAhead(k[:, one.index], v[:, one.index], k, layout, one.layout, first=first, **options)

    def attend_others(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        order: tuple[str, ...],
        keys: tuple[str, ...],
        masked: GivenMask | None,
        scale: float | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """The same with keys of other streams than the queries': ``[B, T, H, D]`` of this rank's queries."""
        layout, kv_layout = (self.layouts.of(self.streams.counts(streams)) for streams in (order, keys))
        how: dict[str, Any] = dict(causal=False, scale=scale, layout=layout, kv_layout=kv_layout, **options)
        return _attend_seen(qkv, self._seen(keys, [self.streams.sizes[s] for s in keys], masked), how)

    def _seen(self, order: tuple[str, ...], sizes: Sequence[int], masked: GivenMask | None) -> Any:
        """The keys that are left (`SeenKeys`) or raised (`RaisedKeys`), by batch rows; None where all are alike."""
        if masked is None or not set(masked.streams) <= set(order):
            return None
        kept: dict[tuple[str, ...], Any] = self._kept.setdefault(masked.mask, {})
        if order not in kept:
            kept[order] = self._find(order, dict(zip(order, sizes)), masked)
        return kept[order]

    def _find(self, order: tuple[str, ...], sizes: dict[str, int], masked: GivenMask) -> list[Any] | None:
        seen = _tokens_of(order, sizes, masked)
        if bool(seen.all()):
            return None
        if not bool(seen.any(1).all()):
            raise ArgumentError(masked.name, "a key to see in every batch row", "a row without")
        ranks = owners([sizes[s] for s in order], self.cp.size, self.streams.units(order))
        out: list[Any] = []
        for row in torch.unique(seen, dim=0):
            rows = (seen == row).all(1).nonzero().flatten().to(self.cp.device)
            left = self._of_rows(rows, row, ranks)
            if masked.mask.is_floating_point():
                others = None if bool(row.all()) else self._of_rows(rows, ~row, ranks)
                out.append(RaisedKeys(left, others, row[ranks == self.cp.rank].float().to(self.cp.device)))
            else:
                out.append(left)
        return out

    def _of_rows(self, rows: Tensor, keys: Tensor, ranks: Tensor) -> SeenKeys:
        """The `keys` ``[T]`` of these batch rows, of which `ranks` says who has each."""
        held = torch.bincount(ranks[keys], minlength=self.cp.size).tolist()
        index = keys[ranks == self.cp.rank].nonzero().flatten()
        return SeenKeys(rows, index.to(self.cp.device), self.layouts.of(tuple(held)))


def _tokens_of(order: tuple[str, ...], sizes: dict[str, int], masked: GivenMask) -> Tensor:
    """A mask of all tokens of the streams of `order`, bool ``[B, T]`` on the host."""
    mask, count = masked.mask, sum(sizes[s] for s in masked.streams)
    if mask.shape[-1] != count or mask.numel() != len(mask) * count:
        expected = f"[B, {count}], the same for every query"
        raise ArgumentError(masked.name, expected, f"{mask.dtype} {list(mask.shape)}")
    values = mask.reshape(len(mask), count).cpu()
    if values.is_floating_point() and not bool(((values == 0) | (values == 1)).all()):
        raise ArgumentError(masked.name, "0 or 1 for each token", "other values")
    parts = values.bool().split([sizes[s] for s in masked.streams], 1)
    given = dict(zip(masked.streams, parts))
    return torch.cat([given.get(s, torch.ones(len(mask), sizes[s], dtype=torch.bool, device="cpu")) for s in order], 1)


def _attend_seen(qkv: tuple[Tensor, Tensor, Tensor], kept: list[SeenKeys] | None, how: dict[str, Any]) -> Tensor:
    """Attention over the keys that are left; over all of them by None."""
    q, k, v = qkv
    if kept is None:
        return attention(q, k, v, **how).o
    if len(kept) == 1:
        (one,) = kept
        return attention(q, k[:, one.index], v[:, one.index], **how | {"kv_layout": one.layout}).o
    parts = [_over(qkv, one, how).o for one in kept]
    return torch.cat(parts)[torch.argsort(torch.cat([one.rows for one in kept]))]


def _attend_raised(qkv: tuple[Tensor, Tensor, Tensor], kept: list[RaisedKeys] | None, how: dict[str, Any]) -> Tensor:
    """Attention over all keys, some of which have their scores raised by 1: both parts, put together by their lse."""
    q, k, v = qkv
    if kept is None:
        return attention(q, k, v, **how).o
    parts = []
    for rows in kept:
        (o, lse), other = _over(qkv, rows.raised, how), rows.others
        if other is not None:
            o2, lse2 = _over(qkv, other, how)
            share = torch.sigmoid(lse + rows.queries - lse2).transpose(1, 2)[..., None]
            o = (share * o + (1 - share) * o2).to(o.dtype)
        parts.append(o)
    return torch.cat(parts)[torch.argsort(torch.cat([rows.raised.rows for rows in kept]))]


def _over(qkv: tuple[Tensor, Tensor, Tensor], one: SeenKeys, how: dict[str, Any]) -> AttentionOutput:
    """Attention of some batch rows over some keys."""
    q, k, v = (x[one.rows] for x in qkv)
    return attention(q, k[:, one.index], v[:, one.index], **how | {"kv_layout": one.layout})
