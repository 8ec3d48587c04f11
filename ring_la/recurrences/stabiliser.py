"""The running maximum that keeps exponential input gates in range: m_t = max(f_t + m_{t−1}, i_t), across ranks.

It is a gauge: states are kept as ``S e^{−m}``, and no output depends on it, so it carries no gradient. On a split
sequence each segment's map of m is ``m ↦ max(m + a, b)``; all ranks gather all maps, two numbers a head, and fold them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..blockwise import blocks_of, by_block, fixed
from ..blockwise.fold import folded, of_tokens
from ..comm import Replicated
from ..context import ShardedLayout
from ..linear import CommonOptions, Seams


class Stabiliser(NamedTuple):
    """m before and after each token ``[B, T, H]``, and after each document ``[N, H]``."""

    before: Tensor
    after: Tensor
    final: Tensor


def stabiliser(i: Tensor, f: Tensor, initial: Tensor | None, options: CommonOptions) -> Stabiliser:
    """m of input gates i and forget gates f ``[B, T, H]``, natural logarithms; `initial` ``[N, H]``, None: zero."""
    layout = options.layout
    N = layout.num_documents if layout is not None and layout.packed else i.shape[0]
    cu = options.cu_seqlens
    if cu is not None:
        N = cu.numel() - 1
    wide = torch.promote_types(i.dtype, torch.float32)
    start = i.new_zeros(N, i.shape[2], dtype=wide) if initial is None else initial
    if fixed(layout):
        with torch.no_grad():
            found = _by_block(i.double(), f.double(), start.to(wide), layout)
        return found._replace(final=_or_start(found.final.to(start.dtype), start, layout))
    with torch.no_grad():
        pieces = _Pieces(i.double(), f.double(), layout.cu_pieces.to(i.device) if layout is not None else cu)
        rows = (
            start.double()[None]
            if cu is not None or (layout is not None and layout.packed)
            else start.double()[:, None]
        )
        entering = rows if layout is None else _entering(pieces, rows, layout)
        before, after, ends = pieces.run(entering)
    if layout is None:
        final = ends[0] if cu is not None else ends[:, 0]
        empty = None if cu is None else cu.diff() == 0
    else:
        final, empty = _final(ends, layout)
        start = Replicated.apply(start, layout.cp.comm)
    final = final.to(start.dtype)
    return Stabiliser(before, after, final if empty is None else torch.where(empty[:, None], start, final))


def _or_start(final: Tensor, start: Tensor, layout: ShardedLayout) -> Tensor:
    """m after each document; before it, with its gradient, where a document has no token."""
    lengths = torch.tensor(layout.cu_seqlens, device=final.device).diff()
    empty = lengths == 0 if layout.packed else (lengths == 0).expand(len(final))
    return torch.where(empty[:, None], Replicated.apply(start, layout.cp.comm), final)


def _by_block(i: Tensor, f: Tensor, start: Tensor, layout: ShardedLayout) -> Stabiliser:
    """The same with bits that do not depend on the split. m is rounded to the dtype of states at every token, as any
    gauge will do, so that who goes on from a state goes on from the same number."""
    decay, largest = by_block(_gaps, i, f, layout=layout)
    places = blocks_of(layout)
    ends = [stop - 1 for _, stop in places]

    def step(m: Tensor, part: Tensor) -> Tensor:
        return (part[:, 0] + torch.maximum(part[:, 1], m)).to(start.dtype).double()

    own = torch.stack([decay[:, ends], largest[:, ends]], 2).transpose(0, 1)
    entering, final = folded(own, start.double(), step, layout)
    m = of_tokens(entering, layout)
    after = (decay + torch.maximum(largest, m)).to(start.dtype).double()
    before = torch.cat([m[:, :1], after[:, :-1]], 1)
    first = [begin for begin, _ in places]
    before[:, first] = m[:, first]
    return Stabiliser(before, after, final)


def _gaps(i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token of a block, Σ f from its start and the largest ``i_s − Σ_{r≤s} f_r`` so far."""
    decay = f.cumsum(1)
    return decay, (i - decay).cummax(1).values


class _Pieces:
    """Tokens in pieces: Σ f from each piece's start, and the largest ``i_s − Σ_{r≤s} f_r`` so far."""

    def __init__(self, i: Tensor, f: Tensor, cu: Tensor | None) -> None:
        B, T, H = i.shape
        self.cu = cu = torch.arange(2, device=i.device) * T if cu is None else cu
        token = torch.arange(T, device=i.device)
        self.piece = torch.searchsorted(cu[1:].contiguous(), token, right=True)
        sums = torch.cat([f.new_zeros(B, 1, H), f.cumsum(1)], 1)
        self.decay = sums[:, 1:] - sums.index_select(1, cu[:-1]).index_select(1, self.piece)
        self.total = sums.index_select(1, cu[1:]) - sums.index_select(1, cu[:-1])  # [B, pieces, H]
        gap = i - self.decay
        if not gap.numel():
            self.largest, self.last = gap, gap.new_full((B, cu.numel() - 1, H), -torch.inf)
            return
        step = (gap.amax() - gap.amin() + 1) * self.piece[:, None]  # one maximum, that no earlier piece can hold
        self.largest = (gap + step).cummax(1).values - step
        last = self.largest.index_select(1, (cu[1:] - 1).clamp(min=0)) + self.total
        self.last = last.masked_fill((cu.diff() == 0)[:, None], -torch.inf)

    def run(self, entering: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """m before and after each token, and after each piece, given that before each piece ``[B, pieces, H]``."""
        own = entering.index_select(1, self.piece)
        after = self.decay + torch.maximum(self.largest, own)
        shifted = torch.cat([own[:, :1], after[:, :-1]], 1)
        first = torch.isin(torch.arange(len(self.piece), device=own.device), self.cu)
        before = torch.where(first[:, None], own, shifted)
        return before, after, torch.maximum(entering + self.total, self.last)


def _entering(pieces: _Pieces, rows: Tensor, layout: ShardedLayout) -> Tensor:
    """m before each of this rank's pieces: its document's, or what the segments before leave."""
    seams, H = Seams.of(layout), rows.shape[-1]
    entering = rows.new_zeros(rows.shape[0], len(layout.pieces), H)
    at, documents = seams.starts
    entering.index_copy_(1, at, rows.index_select(1, documents))
    count = max(map(len, (layout.local_segments(r) for r in range(layout.world_size))))
    maps = rows.new_full((count, 2, rows.shape[0], H), -torch.inf)
    for n, (s, (first, last)) in enumerate(zip(seams.links, seams.segments)):
        own = layout.pieces[last].first
        maps[n, 1] = (
            torch.maximum(entering[:, last] + pieces.total[:, last], pieces.last[:, last])
            if own
            else pieces.last[:, last]
        )
        if seams.chain.passes[s]:
            maps[n, 0] = pieces.total[:, first]
    with layout.cp.comm.streams.in_order():
        everyone = layout.cp.comm.all_gather(maps).wait()
    seen, m = [0] * layout.world_size, rows.new_zeros(rows.shape[0], H)
    for s, owner in enumerate(seams.chain.owners):
        if owner == layout.rank and seams.chain.needs[s]:
            entering[:, seams.segments[seams.links.index(s)][0]] = m
        a, b = everyone[owner, seen[owner]]
        seen[owner] += 1
        m = torch.maximum(m + a, b)
    return entering


def _final(ends: Tensor, layout: ShardedLayout) -> tuple[Tensor, Tensor]:
    """m after each document on every rank ``[N, H]``, and which documents have no token."""
    seams = Seams.of(layout)
    out = ends.new_zeros(ends.shape[0], layout.num_documents, ends.shape[2])
    out.index_copy_(1, seams.ends[1], ends.index_select(1, seams.ends[0]))
    out = layout.cp.comm.all_reduce(out).wait()
    empty = torch.zeros(layout.num_documents, dtype=torch.bool, device=out.device)
    empty[seams.empty] = True
    return (out[0], empty) if layout.packed else (out[:, 0], empty.expand(out.shape[0]))
