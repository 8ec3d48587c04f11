"""How an implementation shards: which tokens each rank holds, and the runs and pieces that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..layout import KINDS, Layout, Piece, Segment

Order = Callable[[int, int, tuple[int, ...] | None], Sequence[Tensor]]
"""``order(seq_len, size, cu_seqlens)``: for each rank the global indices of its tokens, in the order it holds them."""


class Split(NamedTuple):
    """The tokens of each rank, and what follows from them.

    Attributes:
        tokens: for each rank the global indices of its tokens, int64 ``[T_local]``, in its order.
        segments: runs of consecutive tokens that one rank holds, in the order of the sequence.
        pieces: the parts of documents in them, in the order of the sequence.
    """

    tokens: tuple[Tensor, ...]
    segments: tuple[Segment, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, kind: str | Order, seq_len: int, size: int, cu_seqlens: tuple[int, ...] | None) -> Split:
        """The split of a layout's name, or of an `Order`.

        Raises:
            ArgumentError: the ranks' tokens are not each token of the sequence once.
        """
        if isinstance(kind, str):
            if kind not in KINDS:
                raise ArgumentError("kinds", f"{', '.join(KINDS)}, or a function", repr(kind))
            tokens = [Layout(seq_len, kind, size, r).tokens() for r in range(size)]  # type: ignore[arg-type]
        else:
            tokens = [torch.as_tensor(t, dtype=torch.int64) for t in kind(seq_len, size, cu_seqlens)]
        if not torch.equal(torch.cat(tokens).sort().values, torch.arange(seq_len)) or len(tokens) != size:
            raise ArgumentError(
                "kinds", f"each of {seq_len} tokens on one of {size} ranks", [t.tolist() for t in tokens]
            )
        segments = tuple(sorted(_runs(tokens), key=lambda s: s.start))
        cu = (0, seq_len) if cu_seqlens is None else cu_seqlens
        return cls(tuple(tokens), segments, tuple(_pieces(segments, cu)))

    def local(self, x: Tensor, rank: int) -> Tensor:
        """A rank's tokens of the whole ``x [B, T, …]``."""
        return x.index_select(1, self.tokens[rank])


def _runs(tokens: Sequence[Tensor]) -> list[Segment]:
    out = []
    for rank, own in enumerate(tokens):
        at = own.tolist()
        starts = [i for i, t in enumerate(at) if i == 0 or t != at[i - 1] + 1]
        out += [Segment(at[a], at[b - 1] + 1, rank) for a, b in zip(starts, [*starts[1:], len(at)])]
    return out


def _pieces(segments: Sequence[Segment], cu: Sequence[int]) -> list[Piece]:
    out = []
    for i, s in enumerate(segments):
        for document, (a, b) in enumerate(zip(cu, cu[1:])):
            start, stop = max(a, s.start), min(b, s.stop)
            if start < stop:
                out.append(Piece(start, stop, document, i, start == a, stop == b))
    return out
