"""Who owns which tokens of a sequence that is split over ranks. Pure: no communication, no process group.

A sequence of ``seq_len`` tokens is cut into ordered *segments*, each a run of tokens owned by one rank:

    contiguous   P segments,  rank r owns segment r
    zigzag       2P segments, rank r owns segments r and 2P−1−r (balances causal attention); one rank has one
    balanced     up to 8P segments, as many a rank, so that causal attention within packed documents or under a window
                 is even and few keys are sent (`balanced.py`)
    striped      no segments: rank r owns tokens r, r+P, r+2P, …

Segments differ in length by at most one unit of `multiple_of` tokens, so any length works, also one shorter
than the number of ranks (some ranks then own no token). Packed documents are given by ``cu_seqlens`` over the
whole sequence and may start and end anywhere; a *piece* is the part of one document inside one segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import torch
from torch import Tensor

from .balanced import balanced
from .choices import LayoutKind
from .errors import ArgumentError, UnsupportedError
from .kept import once

KINDS = ("contiguous", "zigzag", "balanced", "striped")
WHOLE = "This is the whole sequence: layout.shard(x) first"


@dataclass(frozen=True)
class Segment:
    """Tokens ``start … stop−1`` of the sequence, owned by rank `owner`."""

    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class Piece:
    """The part of one document inside one segment: global tokens ``start … stop−1``.

    `segment` is the index of the segment in the sequence; `first` and `last` say whether the document
    starts and ends here.
    """

    start: int
    stop: int
    document: int
    segment: int
    first: bool
    last: bool

    def __len__(self) -> int:
        return self.stop - self.start


class Layout:
    """The split of one sequence over `world_size` ranks, seen from `rank`.

    Args:
        seq_len: number of tokens of the whole sequence, ≥ 1.
        kind: "contiguous", "zigzag", "balanced" or "striped".
        world_size, rank: the number of ranks, and this one.
        cu_seqlens: offsets ``[N+1]`` of N packed documents in the whole sequence (a tensor or a sequence of
            ints, from 0 to seq_len, never decreasing; empty documents are allowed). None: one document.
        multiple_of: segment borders fall on multiples of this many tokens.
        of_documents: the multiples count from the start of each document, and documents' ends are borders, too.
        window: earlier keys that a query sees, for "balanced"; None: all of its document.

    Raises:
        ArgumentError: naming the argument that is wrong.
    """

    def __init__(
        self,
        seq_len: int,
        kind: LayoutKind = "contiguous",
        world_size: int = 1,
        rank: int = 0,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        multiple_of: int = 1,
        of_documents: bool = False,
        window: int | None = None,
    ) -> None:
        if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
            raise ArgumentError("seq_len", "an int ≥ 1 (tokens of the whole sequence)", repr(seq_len))
        if kind not in KINDS:
            raise ArgumentError("kind", f"one of {', '.join(KINDS)}", repr(kind))
        if world_size < 1 or not 0 <= rank < world_size:
            raise ArgumentError("rank", f"0 ≤ rank < world_size = {world_size}", rank)
        if not isinstance(multiple_of, int) or isinstance(multiple_of, bool) or multiple_of < 1:
            raise ArgumentError("multiple_of", "an int ≥ 1", repr(multiple_of))
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 0):
            raise ArgumentError("window", "None or an int ≥ 0 (earlier keys of a query)", repr(window))
        if window is not None and kind != "balanced":
            raise ArgumentError("window", f"None with kind={kind!r}, which does not look at work", window)
        self.kind: LayoutKind = kind
        self.seq_len, self.world_size, self.rank = seq_len, world_size, rank
        self.multiple_of, self.of_documents, self.window = multiple_of, of_documents, window
        self.packed = cu_seqlens is not None
        self.cu_seqlens = (0, seq_len) if cu_seqlens is None else check_cu_seqlens(cu_seqlens, seq_len)
        # ints and not counted when asked for: torch.compile would have a graph for each length of the tuple
        self.num_documents = len(self.cu_seqlens) - 1
        self.num_successors = seq_len - sum(a < b for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:]))

    def __repr__(self) -> str:
        documents = f", {self.num_documents} documents" if self.packed else ""
        return f"Layout({self.seq_len} tokens, {self.kind}, rank {self.rank} of {self.world_size}{documents})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def split(self) -> tuple:
        """What decides who owns which token."""
        split = (self.seq_len, self.kind, self.world_size, self.multiple_of)
        by_documents = self.kind == "balanced" or (self.of_documents and self.kind != "striped")
        return (*split, self.cu_seqlens, self.window) if by_documents else split

    @property
    def key(self) -> tuple:
        """Everything that must be the same on all ranks."""
        return (self.split, self.packed, self.cu_seqlens)

    # -- segments and pieces -------------------------------------------------------------------------------

    @property
    def has_runs(self) -> bool:
        """Whether ranks own runs of consecutive tokens (a striped layout has none)."""
        return self.kind != "striped"

    def require_runs(self, who: str) -> None:
        """Refuse a striped layout for an operator that passes a state along the sequence."""
        if not self.has_runs:
            raise UnsupportedError(
                "layout",
                f'runs of tokens for {who} ("contiguous", "zigzag" or "balanced")',
                '"striped"',
                "Convert first: layout.convert(x, other_layout) with other_layout = cp.layout(seq_len, kind='zigzag')",
            )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments of the sequence in order; empty ones (a sequence shorter than their number) are left out."""
        self.require_runs("segments")
        p = self.world_size
        borders_of = self._borders_in_documents if self.of_documents else self._borders
        if self.kind == "balanced":
            unit = None if self.of_documents else self.multiple_of
            return self._joined(*balanced(borders_of, self.cu_seqlens, p, self.window, unit))
        n = p if self.kind == "contiguous" or p == 1 else 2 * p
        borders = borders_of(n)
        owners = [*range(p), *reversed(range(p))][:n]
        return tuple(Segment(a, b, r) for a, b, r in zip(borders, borders[1:], owners) if b > a)

    @staticmethod
    def _joined(borders: list[int], owners: list[int]) -> tuple[Segment, ...]:
        """The segments that are not empty, neighbours of one owner as one."""
        out: list[Segment] = []
        for a, b, owner in zip(borders, borders[1:], owners):
            if out and out[-1].owner == owner:
                out[-1] = Segment(out[-1].start, b, owner)
            elif b > a:
                out.append(Segment(a, b, owner))
        return tuple(out)

    def _borders(self, n: int) -> list[int]:
        units = -(-self.seq_len // self.multiple_of)
        return [min(self.seq_len, self.multiple_of * (i * units // n)) for i in range(n + 1)]

    def _borders_in_documents(self, n: int) -> list[int]:
        """The last place where a border may be before each even share of the tokens."""
        cu = self.cu_seqlens
        may = sorted({t for a, b in zip(cu, cu[1:]) for t in range(a, b, self.multiple_of)} | {self.seq_len})
        return [may[bisect_right(may, i * self.seq_len // n) - 1] for i in range(n + 1)]

    def local_segments(self, rank: int | None = None) -> tuple[int, ...]:
        """Indices of the segments `rank` (default: this one) owns, in order."""
        rank = self.rank if rank is None else rank
        return tuple(i for i, s in enumerate(self.segments) if s.owner == rank)

    def starts_document(self, token: int) -> bool:
        """Whether a document starts at this token of the sequence."""
        i = bisect_left(self.cu_seqlens, token)
        return i < len(self.cu_seqlens) and self.cu_seqlens[i] == token

    def pieces_of(self, segment: int) -> tuple[Piece, ...]:
        """The parts of documents inside one segment, in order."""
        s, cu = self.segments[segment], self.cu_seqlens
        out, start = [], s.start
        while start < s.stop:
            doc = bisect_right(cu, start) - 1
            stop = min(s.stop, cu[doc + 1])
            out.append(Piece(start, stop, doc, segment, start == cu[doc], stop == cu[doc + 1]))
            start = stop
        return tuple(out)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of this rank, in the order of its local tokens."""
        return tuple(p for s in self.local_segments() for p in self.pieces_of(s))

    @cached_property
    def piece_offsets(self) -> tuple[int, ...]:
        """Local offsets ``[pieces+1]`` of this rank's pieces: what cu_seqlens is to a whole sequence."""
        out = [0]
        for p in self.pieces:
            out.append(out[-1] + len(p))
        return tuple(out)

    # -- tokens --------------------------------------------------------------------------------------------

    def tokens(self, rank: int | None = None) -> Tensor:
        """Global index of each local token of `rank` (default: this one), int64 ``[T_local]``."""
        rank = self.rank if rank is None else rank
        if self.kind == "striped":
            return torch.arange(self.seq_len, device="cpu")[rank :: self.world_size].contiguous()
        runs = [torch.arange(s.start, s.stop, device="cpu") for s in self.segments if s.owner == rank]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device="cpu")

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        if self.kind == "striped":
            return tuple(len(range(r, self.seq_len, self.world_size)) for r in range(self.world_size))
        out = [0] * self.world_size
        for s in self.segments:
            out[s.owner] += s.stop - s.start
        return tuple(out)

    @property
    def local_length(self) -> int:
        """Number of tokens this rank owns."""
        return self.lengths[self.rank]

    def require_local(self, name: str, tokens: int) -> None:
        """Refuse an argument whose tokens are not those of this rank, by their number."""
        if tokens == self.local_length:
            return
        if tokens == self.seq_len:
            raise ArgumentError(name, "this rank's tokens with a layout", f"all {tokens}", WHOLE)  # alike on all ranks
        raise ArgumentError("layout", f"one with {tokens} tokens on this rank, the T of {name}", self.local_length)

    @once
    def order(self) -> Tensor:
        """Global token indices of rank 0's tokens, then rank 1's, …: int64 ``[seq_len]``."""
        return torch.cat([self.tokens(r) for r in range(self.world_size)])

    def documents_of(self, tokens: Tensor) -> Tensor:
        """Document of each global token index, int64."""
        return torch.searchsorted(torch.tensor(self.cu_seqlens[1:], device=tokens.device), tokens, right=True)

    def positions_of(self, tokens: Tensor) -> Tensor:
        """Position of each global token index inside its document, int64."""
        return tokens - torch.tensor(self.cu_seqlens, device=tokens.device)[self.documents_of(tokens)]

    def successors(self, rank: int) -> Tensor:
        """Global index of the token after each of `rank`'s in its document, −1 after the last, int64 ``[T_local]``."""
        tokens = self.tokens(rank)
        last = torch.isin(tokens + 1, torch.tensor(self.cu_seqlens, device=tokens.device))
        return torch.where(last, -1, tokens + 1)

    def owners_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Owning rank and local index there of each global token index, int64."""
        if self.kind == "striped":
            return tokens % self.world_size, tokens // self.world_size
        offset, base = [0] * self.world_size, []
        for s in self.segments:
            base.append(offset[s.owner] - s.start)
            offset[s.owner] += s.stop - s.start
        stops = torch.tensor([s.stop for s in self.segments], device=tokens.device)
        segment = torch.searchsorted(stops, tokens, right=True)
        owners = torch.tensor([s.owner for s in self.segments], device=tokens.device)
        return owners[segment], tokens + torch.tensor(base, device=tokens.device)[segment]


def check_cu_seqlens(cu_seqlens: Tensor | Sequence[int], seq_len: int, name: str = "cu_seqlens") -> tuple[int, ...]:
    """The offsets as a tuple of ints, after checking that they run from 0 to `seq_len` without decreasing."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            got = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            raise ArgumentError(name, "a one-dimensional integer tensor [N+1]", got)
        values = cu_seqlens.tolist()
    else:
        try:
            values = [index(x) for x in cu_seqlens]
        except TypeError:
            raise ArgumentError(name, "a sequence of ints [N+1]", repr(cu_seqlens)) from None
    if len(values) < 2:
        raise ArgumentError(name, "at least two offsets [0, …, seq_len]", values)
    if values[0] != 0:
        raise ArgumentError(name, "to start at 0", f"{values[0]} first")
    for i, (a, b) in enumerate(zip(values, values[1:])):
        if b < a:
            raise ArgumentError(name, "offsets that never decrease", f"{a} then {b} at index {i + 1}")
    if values[-1] != seq_len:
        raise ArgumentError(name, f"to end at the number of tokens, {seq_len}", f"{values[-1]} last")
    return tuple(values)
