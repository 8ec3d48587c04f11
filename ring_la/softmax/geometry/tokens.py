"""Where rows of q, k and v stand in the sequence: their index, document and position. Pure, host side.

Masks speak documents and positions only, so a row must say where it stands, whatever way the sequence was split. A
`Run` is a stretch of rows of one document at a constant stride (1; the number of ranks where the layout is striped),
so that a mask between two runs is known on the host by arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...kept import MadeOnce, once
from ...layout import Layout

ANY_DOCUMENT = -1
"""The document of keys that every document sees (joint tokens)."""


@dataclass(frozen=True)
class Run:
    """Rows ``offset … offset + length − 1`` of a tensor: tokens of one document at a constant stride.

    `index` is the place of the first one in the whole sequence, `position` its place in its document; cross-attention
    shifts the positions of queries so that a document's last query stands at its last key.
    """

    offset: int
    length: int
    index: int
    position: int
    document: int
    stride: int = 1

    @property
    def last(self) -> int:
        """Position of the last row."""
        return self.position + (self.length - 1) * self.stride

    def part(self, start: int, length: int, offset: int) -> Run:
        """`length` rows of this run from its row `start`, as rows from `offset` on."""
        skip = start * self.stride
        return Run(offset, length, self.index + skip, self.position + skip, self.document, self.stride)


class Tokens:
    """The rows of one side of a block. Compared by identity, so that what is derived from two sides can be kept.

    Args:
        runs: the runs in the order of their rows; None where only the device knows them (packed offsets on a GPU).
        length: number of rows.
        device: where the tensors below live.
        tensors: (positions, documents) where there are no runs.
        packed: whether, without runs, these are documents one after the other.

    Attributes:
        kept: what is made once for these rows.
        met: what is made once for them and another side, by how far a query sees; see `Pair`.
        ordered: whether rows stand in the order of the sequence.
        rising: whether rows stand by document, then by position, as is known without reading the device.
    """

    def __init__(
        self,
        runs: Sequence[Run] | None,
        length: int,
        device: torch.device,
        tensors: tuple[Tensor, Tensor] | None = None,
        packed: bool = False,
    ) -> None:
        self.runs = None if runs is None else tuple(runs)
        self.length, self.device, self._tensors = length, device, tensors
        self.kept = MadeOnce()
        self.met: WeakKeyDictionary[Tokens, dict[object, MadeOnce]] = WeakKeyDictionary()
        self.ordered = runs is None or all(
            a.index + (a.length - 1) * a.stride < b.index for a, b in zip(runs, runs[1:])
        )
        self.rising = packed if runs is None else _rises(runs)

    def __len__(self) -> int:
        return self.length

    def _column(self, name: str) -> Tensor:
        if not self.runs:
            return torch.zeros(self.length, dtype=torch.int64, device=self.device)
        steps = [getattr(r, name) + r.stride * torch.arange(r.length, device="cpu") for r in self.runs]
        return torch.cat(steps).to(self.device)

    @once
    def positions(self) -> Tensor:
        """Position of each row in its document, int64 ``[T]``."""
        return self._column("position") if self._tensors is None else self._tensors[0]

    @once
    def index(self) -> Tensor:
        """Place of each row in the whole sequence, int64 ``[T]``."""
        return self._column("index") if self._tensors is None else torch.arange(self.length, device=self.device)

    @once
    def documents(self) -> Tensor:
        """Document of each row, int64 ``[T]``; ANY_DOCUMENT for rows that every document sees."""
        if self._tensors is not None:
            return self._tensors[1]
        columns = [torch.full((r.length,), r.document, device="cpu") for r in self.runs or ()]
        return (torch.cat(columns) if columns else torch.zeros(0, dtype=torch.int64, device="cpu")).to(self.device)

    @once
    def places(self) -> Tensor:
        """The row of each place in the whole sequence, int32, up to the last one that is here; −1: no row is."""
        if self.runs is None:
            return torch.arange(self.length, dtype=torch.int32, device=self.device)
        end = max((r.index + (r.length - 1) * r.stride + 1 for r in self.runs), default=0)
        out = torch.full((end,), -1, dtype=torch.int32, device=self.device)
        out[self.index] = torch.arange(self.length, dtype=torch.int32, device=self.device)
        return out

    @once
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """(position, document, index) of each row, int32 ``[T]``, as kernels read them."""
        columns = (self.positions, self.documents, self.index)
        position, document, index = (x.to(torch.int32).contiguous() for x in columns)
        return position, document, index

    @cached_property
    def by_document(self) -> dict[int, list[Run]]:
        """The runs of each document."""
        out: dict[int, list[Run]] = {}
        for run in self.runs or ():
            out.setdefault(run.document, []).append(run)
        return out

    # -- makers --------------------------------------------------------------------------------------------

    @classmethod
    def whole(cls, length: int, device: torch.device, cu: Sequence[int] | None = None, shift: int = 0) -> Tokens:
        """All rows of one device; `cu` are the offsets of packed documents, `shift` moves every position."""
        cu = (0, length) if cu is None else cu
        runs = [Run(a, b - a, a, shift, d) for d, (a, b) in enumerate(zip(cu, cu[1:])) if b > a]
        return cls(runs, length, device)

    @classmethod
    def packed(cls, length: int, cu: Tensor) -> Tokens:
        """All rows of one device, packed at offsets only the device knows. No synchronisation."""
        index = torch.arange(length, device=cu.device)
        documents = torch.searchsorted(cu[1:].to(torch.int64).contiguous(), index, right=True)
        return cls(None, length, cu.device, (index - cu.to(torch.int64)[documents], documents), True)

    @classmethod
    def of_ranks(
        cls, layout: Layout, ranks: Sequence[int], device: torch.device, other: Layout | None = None
    ) -> Tokens:
        """The rows of these ranks one after the other; queries of cross-attention name the keys' layout as `other`."""
        shifts = _shifts(layout, other)
        runs: list[Run] = []
        offset = 0
        for rank in ranks:
            for index, length, document, stride in _runs_of(layout, rank):
                position = index - layout.cu_seqlens[document] + shifts[document]
                _append(runs, Run(offset, length, index, position, document, stride))
                offset += length
        return cls(runs, offset, device)

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """The rows of all parts, one part after the other."""
        runs: list[Run] = []
        offset = 0
        for part in parts:
            for run in part.runs or ():
                _append(runs, replace(run, offset=run.offset + offset))
            offset += len(part)
        return cls(runs, offset, parts[0].device)

    def cut(self, start: int, stop: int) -> Tokens:
        """Rows ``start … stop − 1``."""
        runs = []
        for run in self.runs or ():
            a, b = max(start, run.offset), min(stop, run.offset + run.length)
            if a < b:
                runs.append(run.part(a - run.offset, b - a, a - start))
        return Tokens(runs, stop - start, self.device)

    def sorted(self) -> tuple[Tokens, Tensor]:
        """The same rows in the order of the sequence, and the row each of them comes from, int64 ``[T]``."""
        order = torch.argsort(self.index.cpu(), stable=True)
        index, documents, positions = (x.cpu()[order] for x in (self.index, self.documents, self.positions))
        runs: list[Run] = []
        if len(index):
            step, document = index.diff(), documents.diff()
            cuts = torch.nonzero((document != 0) | (step != 1)).flatten().add(1).tolist()
            for a, b in zip([0, *cuts], [*cuts, len(index)]):
                runs.append(Run(a, b - a, int(index[a]), int(positions[a]), int(documents[a])))
        return Tokens(runs, self.length, self.device), order.to(self.device)

    def fewest_runs(self) -> tuple[Tokens, Tensor | None]:
        """The same rows in the order with fewer runs, and the row each comes from (None: they stay where they are)."""
        if self.runs is None or self.ordered:
            return self, None
        inorder, source = self.sorted()
        return (inorder, source) if len(inorder.runs) < len(self.runs) else (self, None)

    @classmethod
    def joint(cls, count: int, device: torch.device, position: int, index: int) -> Tokens:
        """Keys that every document sees, at ``position … position + count − 1`` of each."""
        return cls([Run(0, count, index, position, ANY_DOCUMENT)] if count else [], count, device)

    def from_ends(self, ends: Any) -> Tokens:
        """The same rows with positions counted from the end of their document: its first key after it is at 0."""
        if self.runs is None:
            return Tokens(
                None, self.length, self.device, (self.positions - ends[self.documents], self.documents), self.rising
            )
        runs = [replace(r, position=r.position - ends[r.document]) for r in self.runs]
        return Tokens(runs, self.length, self.device)


def _shifts(layout: Layout, other: Layout | None) -> list[int]:
    cu = layout.cu_seqlens
    if other is None:
        return [0] * layout.num_documents
    return [(d - c) - (b - a) for a, b, c, d in zip(cu, cu[1:], other.cu_seqlens, other.cu_seqlens[1:])]


def _runs_of(layout: Layout, rank: int) -> list[tuple[int, int, int, int]]:
    """(index, length, document, stride) of each run of a rank."""
    if layout.has_runs:
        return [(p.start, len(p), p.document, 1) for s in layout.local_segments(rank) for p in layout.pieces_of(s)]
    out, p = [], layout.world_size
    for document, (a, b) in enumerate(zip(layout.cu_seqlens, layout.cu_seqlens[1:])):
        mine = range(a + (rank - a) % p, b, p)
        if len(mine):
            out.append((mine[0], len(mine), document, p))
    return out


def _rises(runs: Sequence[Run]) -> bool:
    if any(r.document == ANY_DOCUMENT for r in runs):
        return False
    return all((a.document, a.last) < (b.document, b.position) for a, b in zip(runs, runs[1:]))


def _append(runs: list[Run], run: Run) -> None:
    """Add a run, to the last one where it continues that."""
    if runs:
        a = runs[-1]
        if a.document == run.document and a.stride == run.stride == 1 and a.index + a.length == run.index:
            runs[-1] = replace(a, length=a.length + run.length)
            return
    runs.append(run)
