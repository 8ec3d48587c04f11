"""Where the pieces of a layout meet: what a split call knows of it before it sees a tensor."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..algebra import Affine
from ..comm import Group
from ..context import CANONICAL_CHUNK, ShardedLayout
from ..scan import Chain, Horizon, MailboxBorder


class Crossing(NamedTuple):
    """A map of a link's shape, without values; bytes of its state; where kernels exchange states by themselves."""

    maps: Affine
    size: int
    border: MailboxBorder | None


class Seams:
    """Where a rank's pieces meet: documents' ends, and the segments whose state comes from another rank.

    `starts` and `ends` pair local pieces with the documents that start or end in them, as index tensors (pieces,
    documents) on the layout's device, and `empty` the documents without a token; `segments` gives the first and
    last local piece of each owned segment; `lead` says how far each piece begins behind the start of one of its
    document's canonical chunks.
    `alone`: no state goes from one segment to another, on any rank.
    """

    def __init__(self, layout: ShardedLayout) -> None:
        pieces, cu = layout.pieces, layout.cu_seqlens

        def index(numbers: Iterable[int]) -> Tensor:
            return torch.tensor(list(numbers), dtype=torch.int64, device=layout.cp.device)

        def paired(chosen: list[int]) -> tuple[Tensor, Tensor]:
            return index(chosen), index(pieces[i].document for i in chosen)

        self.chain = Chain.of(layout)
        self.lead = index([(p.start - cu[p.document]) % CANONICAL_CHUNK for p in pieces] or [0])
        self.starts = paired([i for i, p in enumerate(pieces) if p.first])
        self.ends = paired([i for i, p in enumerate(pieces) if p.last])
        self.empty = index(n for n in range(layout.num_documents) if cu[n] == cu[n + 1])
        self.links = layout.local_segments()
        where = [[i for i, p in enumerate(pieces) if p.segment == s] for s in self.links]
        self.segments = [(w[0], w[-1]) for w in where]
        self.pieces = max(1, len(pieces))
        self.crossings: dict[Hashable, Crossing] = {}
        self.alone = not any(self.chain.needs)
        self._horizons: dict[tuple[tuple[float, ...], torch.dtype], Horizon | None] = {}
        self._border: MailboxBorder | None = None
        self._device, self._deterministic = layout.cp.device, layout.cp.deterministic
        lengths = [s.stop - s.start for s in layout.segments]
        self._shortest = min((n for n, passes in zip(lengths, self.chain.passes) if passes), default=0)

    def horizon(self, decays: tuple[float, ...], dtype: torch.dtype) -> Horizon | None:
        """The heads of these log-decays that forget within every link; None: there are none, or the canonical fold
        goes through every chunk."""
        if self._deterministic:
            return None
        if (decays, dtype) not in self._horizons:
            self._horizons[decays, dtype] = Horizon.of(decays, self._shortest, dtype, self._device)
        return self._horizons[decays, dtype]

    def border(self, group: Group) -> MailboxBorder:
        """The exchange as launches of the kernels', made once."""
        if self._border is None:
            self._border = MailboxBorder(group, self.chain, self.segments, self.pieces)
        return self._border

    @classmethod
    def of(cls, layout: ShardedLayout) -> Seams:
        """The seams of a layout, made once."""
        return layout.kept(cls, lambda: cls(layout))
