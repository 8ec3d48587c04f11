"""The best keys of each query, of scores that are formed some at a time."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..context import ShardedLayout
from ..kernels.choice import triton_installed
from ..layout import Layout

SCORES = 1 << 24
"""Scores that exist at once, of all batch rows and heads together."""
CHUNK = 1 << 14
"""Keys whose scores are formed at once, at most."""


class Chosen(NamedTuple):
    """What an indexer picked."""

    places: Tensor
    """Places in the whole sequence, int32 ``[B, T, heads, S]``, the best first; −1 where there are fewer."""
    scores: Tensor
    """Their scores ``[B, T, heads, S]``, −∞ there; without a gradient."""


def empty_choice(q: Tensor, keys: Tensor, heads: int, topk: int) -> tuple[Tensor, Tensor]:
    """What an indexer's operator gives a compiler: places and scores of a choice of queries ``[B, T, …]``."""
    shape, wide = (*q.shape[:2], heads, topk), torch.promote_types(keys.dtype, torch.float32)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=wide)


class Rows:
    """Where this rank's tokens stand in the whole sequence.

    Attributes:
        total: tokens of the whole sequence. cu_seqlens: offsets of its documents.
        tokens: place of each, int64 ``[T]``. starts: place of the first token of its document. Both on the device.
        last: the same places on the host, for loops that end with them.

    On one device they may be the last `queries` tokens alone.
    """

    def __init__(
        self,
        length: int,
        layout: ShardedLayout | None,
        cu_seqlens: Tensor | None,
        device: torch.device,
        queries: int | None = None,
    ) -> None:
        self.layout = layout
        whole = layout or Layout(length, cu_seqlens=None if cu_seqlens is None else cu_seqlens.tolist())
        self.total, self.cu_seqlens = whole.seq_len, tuple(whole.cu_seqlens)
        self.last = whole.tokens()[0 if queries is None else -queries :]
        starts = torch.tensor(self.cu_seqlens, device="cpu")[whole.documents_of(self.last)]
        self.tokens, self.starts = self.last.to(device), starts.to(device)

    @classmethod
    def of(cls, x: Tensor, layout: ShardedLayout | None, cu_seqlens: Tensor | None, keys: Tensor | None = None) -> Rows:
        """Those of a tensor ``[B, T, …]``; made once a layout. On one device the last ones of longer `keys`."""

        def make() -> Rows:
            total = x.shape[1] if keys is None else keys.shape[1]
            return cls(total, layout, cu_seqlens, x.device, None if total == x.shape[1] else x.shape[1])

        return layout.kept(cls, make) if isinstance(layout, ShardedLayout) else make()

    def first_of(self, some: slice) -> int:
        """The place of the first key that any of some tokens may choose."""
        return self.cu_seqlens[bisect.bisect_right(self.cu_seqlens, int(self.last[some].min())) - 1]

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """All ranks' rows in order; gradients are summed."""
        return x if self.layout is None else self.layout.gather(x, dim)


def best(
    score: Callable[[slice, slice], Tensor], keys: int, ends: Tensor, shape: tuple[int, int], topk: int, each: int = 1
) -> Chosen:
    """The `topk` best of the keys of each query. Keys come in chunks that do not depend on the rows, so that equal
    scores are decided alike on every split.

    Args:
        score: of some rows and keys, ``[B, n, heads, m]``, −∞ where a row may not choose.
        ends: for each row the number of keys before which all stand that it may choose, on the host ``[T]``.
        keys: how many there are. shape: B and heads. each: numbers that a score is made of.

    Returns:
        key numbers for places.
    """
    B, heads = shape
    chunk, out = min(max(1, CHUNK // each), keys), None
    n = max(1, SCORES // max(1, chunk * B * heads * each))
    for a in range(0, len(ends), n):
        strip = slice(a, min(a + n, len(ends)))
        found: _Best | None = None
        for first in range(0, int(ends[strip].max()), chunk):
            s = score(strip, slice(first, min(first + chunk, keys)))
            found = _best_of(s, topk) if found is None else found
            found.add(s, first)
        assert found is not None  # a row may choose itself
        out = _none(s, len(ends), topk) if out is None else out
        found.write(out.places[:, strip], out.scores[:, strip])
    return _none(score(slice(0, 0), slice(0, 1)), 0, topk) if out is None else out


class _Best(Protocol):
    """The best of some rows, whose scores come chunk by chunk."""

    def add(self, s: Tensor, first: int) -> None:
        """Scores ``[B, n, heads, m]`` of the keys from `first` on."""

    def write(self, places: Tensor, scores: Tensor) -> None:
        """The best, ``[B, n, heads, topk]``, where there are any."""


def _best_of(s: Tensor, topk: int) -> _Best:
    """What keeps the best of scores like these."""
    if s.dtype == torch.float32 and s.is_cuda and triton_installed():
        from . import best_kernel

        if topk <= best_kernel.MOST:
            return best_kernel.BestLists(s.shape[:3], topk, s.device)
    return _Sorted(topk)


class _Sorted:
    """The best by PyTorch's sorts."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, s: Tensor, first: int) -> None:
        s, at = s.topk(min(self._topk, s.shape[-1]), -1, sorted=False)
        at = (at + first).int()
        if self._found is not None:
            s, at = torch.cat([self._found[0], s], -1), torch.cat([self._found[1], at], -1)
            s, order = s.topk(min(self._topk, s.shape[-1]), -1, sorted=False)
            at = at.gather(-1, order)
        self._found = s, at

    def write(self, places: Tensor, scores: Tensor) -> None:
        assert self._found is not None
        found, at = self._found
        s, order = found.sort(-1, descending=True)  # once, not for every chunk of keys
        m = s.shape[-1]
        scores[..., :m] = s
        places[..., :m] = at.gather(-1, order).masked_fill_(torch.isneginf(s), -1)


def _none(scores: Tensor, rows: int, topk: int) -> Chosen:
    """No choice yet for so many rows, of heads like those of ``scores [B, n, heads, m]``."""
    shape = len(scores), rows, scores.shape[2], topk
    return Chosen(scores.new_full(shape, -1, dtype=torch.int32), scores.new_full(shape, -torch.inf))
