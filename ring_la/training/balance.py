"""Documents packed by the work they make rather than by their tokens, for data with a long tail.

A causal document of n tokens costs ``a·n + b·n(n + 1)/2``: sequences of equal length differ by what their longest
documents cost, and every rank waits for the slowest. So documents are spread over the sequences of a few steps by work
(longest processing time first, Graham 1969: the dearest document goes to the sequence with the least work that has
room), sequences of about the same work make a step and are worked on at the same time, and within a sequence documents
stand in the order that spreads attention best over the ranks of its layout.

No document is cut, unless it is longer than a sequence or than asked for, none is left out of an epoch, and none sees
another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..checks import check_int, is_int
from ..choices import LayoutKind
from ..errors import ArgumentError
from ..layout import Layout
from .data import Corpus, check_data, shuffled
from .flops import Work, pairs

TRIED = 16
"""Random orders of a sequence's documents that are compared, beside those by length."""


@dataclass(frozen=True)
class DocumentPart:
    """Tokens ``start … stop − 1`` of a document: all of it, unless it is longer than a sequence."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass
class Bin:
    """A sequence being filled."""

    pieces: list[DocumentPart] = field(default_factory=list)
    tokens: int = 0
    work: float = 0.0

    def add(self, piece: DocumentPart, work: float) -> None:
        self.pieces.append(piece)
        self.tokens += piece.length
        self.work += work


def pack(pieces: Sequence[DocumentPart], bins: int, capacity: int, work: Work) -> tuple[list[Bin], list[DocumentPart]]:
    """Pieces over so many sequences of at most `capacity` tokens, the dearest first; and those that found no room."""
    out, left = [Bin() for _ in range(bins)], []
    for piece in sorted(pieces, key=lambda p: (-p.length, p.document, p.start)):
        room = [b for b in out if b.tokens + piece.length <= capacity]
        if room:
            min(room, key=lambda b: (b.work, b.tokens)).add(piece, work(piece.length))
        else:
            left.append(piece)
    return out, left


def plan(
    lengths: Sequence[int],
    order: Sequence[int],
    bins: int,
    capacity: int,
    work: Work,
    *,
    before: Sequence[DocumentPart] = (),
    pool: int = 1,
    longest: int | None = None,
) -> list[list[Bin]]:
    """The steps of an epoch, each so many sequences: documents are taken in `order`, as many as fit `pool` steps, and
    packed into all their sequences, of which those that cost about the same make a step.

    What finds no room stands first in the next pool, and `before` in the first. Sequences of one step may be empty.
    Documents of more than `longest` tokens (None: the capacity) are cut into parts of so many.
    """
    most = min(capacity, longest or capacity)
    waiting = [*before] + [
        DocumentPart(d, start, min(start + most, lengths[d])) for d in order for start in range(0, lengths[d], most)
    ]
    waiting.reverse()
    left_over, steps = sum(piece.length for piece in waiting), []
    while waiting:
        size = min(pool, -(-left_over // (bins * capacity)))
        taken, tokens = [], 0
        while waiting and tokens + waiting[-1].length <= size * bins * capacity:
            taken.append(waiting.pop())
            tokens += taken[-1].length
        filled, left = pack(taken, size * bins, capacity, work)
        waiting += reversed(left)
        left_over -= tokens - sum(piece.length for piece in left)
        filled.sort(key=lambda b: -b.work)
        steps += [filled[i : i + bins] for i in range(0, len(filled), bins)]
    return steps


def by_rank(lengths: Sequence[int], ranks: int, kind: LayoutKind = "zigzag") -> Tensor:
    """Pairs of attention each rank has in a sequence of these documents, int64 ``[P]``."""
    ends = torch.tensor([0, *lengths], device="cpu").cumsum(0)
    triangles = torch.tensor([0, *(pairs(n) for n in lengths)], device="cpu").cumsum(0)
    total = int(ends[-1])

    def before(t: int) -> int:
        """Pairs of the queries before token t."""
        n = int(torch.searchsorted(ends, t, right=True)) - 1
        return int(triangles[n]) + pairs(t - int(ends[n]))

    out = [0] * ranks
    for s in Layout(total, kind, ranks, cu_seqlens=ends).segments:
        out[s.owner] += before(s.stop) - before(s.start)
    return torch.tensor(out, device="cpu")


def spread_over_ranks(
    pieces: list[DocumentPart], ranks: int, kind: LayoutKind = "zigzag", seed: int = 0
) -> list[DocumentPart]:
    """The pieces in the order, of those tried, whose dearest rank has the least attention; a balanced layout is even
    in any."""
    if ranks == 1 or len(pieces) < 2 or kind == "balanced":
        return pieces
    generator = torch.Generator().manual_seed(seed)
    longest = sorted(pieces, key=lambda p: -p.length)
    tried = [pieces, longest, longest[::-1]]
    tried += [[pieces[i] for i in shuffled(len(pieces), generator).tolist()] for _ in range(TRIED)]
    return min(tried, key=lambda order: int(by_rank([p.length for p in order], ranks, kind).max()))


class BalancedSequences(Dataset):
    """Sequence i of the corpus, its documents packed by work: ``(ids int64 [≤ T], offsets, a list of ints [N+1])``.

    Sequences ``s·M … (s+1)·M − 1`` are step s. What a step sees follows from the seed and M alone; which replica takes
    which of its sequences also from `replicas`. Where the last documents of an epoch leave a sequence empty, they stand
    first in the next epoch.

    Args:
        corpus: the documents. seq_len: T, which a sequence does not exceed. sequences: M, of a step, all replicas'.
        work: what a document costs. seed: of the documents' order.
        replicas: that take M / replicas sequences each, one after the other, as `batches` gives them out.
        ranks, kind: of the layout each sequence is split by.
        pool: steps whose documents are packed together; the more, the more alike the sequences of a step, and the
            more often long documents meet in one.
        max_document: longer documents are cut into parts of this many tokens; None: of `seq_len`.
        begin: the sequence that is number 0.

    Raises:
        ArgumentError: naming the argument.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        sequences: int,
        work: Work,
        *,
        seed: int = 0,
        replicas: int = 1,
        ranks: int = 1,
        kind: LayoutKind = "zigzag",
        pool: int = 16,
        max_document: int | None = None,
        begin: int = 0,
    ) -> None:
        check_data(corpus, seq_len, seed, max_document, begin)
        for name, value in (("replicas", replicas), ("ranks", ranks), ("pool", pool)):
            check_int(name, value, 1)
        if not is_int(sequences, 1) or sequences % replicas:
            raise ArgumentError("sequences", f"a multiple of replicas = {replicas}", repr(sequences))
        if not callable(work) or not 0 <= work(seq_len) < math.inf:
            raise ArgumentError("work", "what a document of so many tokens costs, such as a Work", repr(work))
        split = Layout(seq_len, kind, ranks)  # which refuses a kind that there is not
        if ranks > 1:
            split.require_runs("documents that are balanced over ranks")
        self.corpus, self.seq_len, self.sequences, self.work = corpus, seq_len, sequences, work
        self.seed, self.replicas, self.ranks = seed, replicas, ranks
        self.kind: LayoutKind = kind
        self.pool, self.max_document, self.begin = pool, max_document, begin
        self.lengths: list[int] = corpus.offsets.diff().tolist()
        self._epoch: Callable[[int], list[list[Bin]]] = lru_cache(2)(self._plan)
        self._sizes: list[int] = []
        self._over: dict[int, list[DocumentPart]] = {}

    def _plan(self, epoch: int) -> list[list[Bin]]:
        """The steps of an epoch; documents of its last one that leave a sequence empty go to the next epoch."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        order = shuffled(self.corpus.documents, generator).tolist()
        over = self._over.get(epoch, [])
        keywords: dict[str, Any] = dict(before=over, pool=self.pool, longest=self.max_document)
        steps = plan(self.lengths, order, self.sequences, self.seq_len, self.work, **keywords)
        full = [all(b.tokens > 1 for b in step) for step in steps]
        self._over[epoch + 1] = [p for step, whole in zip(steps, full) if not whole for b in step for p in b.pieces]
        steps = [step for step, whole in zip(steps, full) if whole]
        if not steps:
            expected = f"documents for {self.sequences} sequences of 2 tokens and more"
            raise ArgumentError("corpus", expected, f"{self.corpus.documents} of {self.corpus.size} tokens")
        return [steps[i] for i in shuffled(len(steps), generator).tolist()]

    def _find(self, step: int) -> list[Bin]:
        """The sequences of a step."""
        epoch = 0
        while True:
            if epoch == len(self._sizes):
                self._sizes.append(len(self._epoch(epoch)))
            if step < self._sizes[epoch]:
                return self._epoch(epoch)[step]
            step, epoch = step - self._sizes[epoch], epoch + 1

    def pieces(self, i: int) -> list[DocumentPart]:
        """What sequence i consists of."""
        step, slot = divmod(self.begin + i, self.sequences)
        bins = self._find(step)  # the dearest first
        replica, turn = divmod(slot, self.sequences // self.replicas)
        chosen = bins[turn * self.replicas + replica]  # those of one turn cost about the same
        return spread_over_ranks(chosen.pieces, self.ranks, self.kind, self.seed + step)

    def __getitem__(self, i: int) -> tuple[Tensor, list[int]]:
        offsets, parts, cu = self.corpus.offsets, [], [0]
        for piece in self.pieces(i):
            first = int(offsets[piece.document])
            parts.append(self.corpus.tokens[first + piece.start : first + piece.stop])
            cu.append(cu[-1] + piece.length)
        return torch.cat(parts).long(), cu
