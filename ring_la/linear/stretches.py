"""Runs of a rank's tokens that go one after the other, and the ranks that their states come from and go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..blockwise import BLOCK, fixed
from ..context import ShardedLayout
from ..scan import Chain


class DocumentRun(NamedTuple):
    """Consecutive local tokens of one document: the first one's position in it, whether it starts and ends here, and
    the local piece they are of."""

    start: int
    stop: int
    position: int
    document: int
    first: bool
    last: bool
    piece: int


class Stretch(NamedTuple):
    """The runs of one segment; the ranks that its state comes from and goes to (None: from and to nobody)."""

    runs: tuple[DocumentRun, ...]
    source: int | None
    target: int | None


def on_one_device(like: Tensor, cu_seqlens: Tensor | None, seen: Sequence[int]) -> tuple[Stretch, ...]:
    """All documents of tensors ``[B, T, …]``, whose first tokens have the positions `seen`; the host reads offsets."""
    cu = [0, like.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    documents = [(n, a, b) for n, (a, b) in enumerate(zip(cu, cu[1:])) if b > a and len(like)]
    runs = [DocumentRun(a, b, seen[n], n, True, True, i) for i, (n, a, b) in enumerate(documents)]
    return (Stretch(tuple(runs), None, None),)


def on_ranks(layout: ShardedLayout, seen: Sequence[int]) -> tuple[Stretch, ...]:
    """This rank's segments, in the order of the sequence."""
    chain, at, piece, stretches = Chain.of(layout), 0, 0, []
    for s in layout.local_segments():
        runs = []
        for p in layout.pieces_of(s):
            end, most = at + len(p), BLOCK if fixed(layout) else len(p)
            position = seen[p.document] + p.start - layout.cu_seqlens[p.document] - at
            for a in range(at, end, most):
                b = min(a + most, end)
                ends = p.first and a == at, p.last and b == end
                runs.append(DocumentRun(a, b, position + a, p.document, *ends, piece))
            at, piece = end, piece + 1
        source = chain.owners[s - 1] if chain.needs[s] else None
        stretches.append(Stretch(tuple(runs), source, chain.owners[s + 1] if chain.feeds(s) else None))
    return tuple(stretches)
