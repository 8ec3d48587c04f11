"""NSA over keys that stay on the ranks that read them (`ring_la.keystore`), token by token or for some tokens more.

A layer keeps 3·Hk heads of a token. In those of the first branch stands no key of its own, but the one made of the
block that ends with the token, or zeros; the others are keys and values of the chosen and of the near ones. Of the
first branch's own keys the last ``length − 1`` are everywhere (`LayerKeys.carried`): the next blocks are made of them.

    own      each rank gives queries, which are everywhere, what its compressed keys give them; one all-gather merges
    choice   with lse of all each rank adds up p of its own, by blocks; one all-gather of ``[n, Hk, blocks]`` sums them
    rest     the chosen and the near tokens that a rank has; one all-gather merges both branches

So a token reads S/stride keys, the chosen ones and the window's, of all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..context import ShardedLayout
from ..indexers.chosen import Rows
from ..keystore import LayerKeys
from ..keystore.chosen import Asking, gathered, own_chosen
from ..keystore.decode import merged
from ..keystore.whereabouts import Whereabouts
from ..softmax.merging import wide
from .choice import Sizes
from .compressed import BlockMap, Compressed, mapped

SCORES = 1 << 24
"""Scores of compressed keys that exist at once."""
Maps = tuple[BlockMap, BlockMap]


class Ends(NamedTuple):
    """This rank's tokens of a sequence that end a block: where they are, ``[M]`` each, and their positions."""

    slab: Tensor
    row: Tensor
    place: Tensor


@torch.no_grad()
def keep(state: LayerKeys, k: Tensor, v: Tensor, maps: Maps, sizes: Sizes, layout: ShardedLayout | None) -> None:
    """Write new tokens: this rank's of a layout before which there are none, or tokens more of each sequence, the same
    on all ranks, of which it takes its own. Collective under a layout.

    Args:
        k, v: ``[B, T, 3·Hk, ·]`` of the three branches. maps: of `nsa`.
    """
    Hk = k.shape[2] // 3
    own = torch.cat([k[:, :, :Hk], v[:, :, :Hk]], -1)
    if layout is not None and not any(state.rows.earlier):
        made, last = _made_of_layout(k[:, :, :Hk], v[:, :, :Hk], maps, sizes, layout)
    else:
        made, last = _made(own, state, maps, sizes)
        if layout is not None:
            made, k, v = (layout.shard(x) for x in (made, k, v))
    state.carry(last)
    of_k, of_v = made.split([k.shape[3], v.shape[3]], -1)
    state.put(torch.cat([of_k, k[:, :, Hk:]], 2), torch.cat([of_v, v[:, :, Hk:]], 2))


def _made_of_layout(k: Tensor, v: Tensor, maps: Maps, sizes: Sizes, layout: ShardedLayout) -> tuple[Tensor, Tensor]:
    """Compressed keys and values ``[B, T, Hk, ·]`` where this rank's tokens end a block; and the last tokens' own."""
    rows = Rows.of(k, layout, None)
    compressed = Compressed.of(sizes.length, sizes.stride, rows)
    blocks = mapped(compressed.blocks(k, v), *maps, compressed.positions)
    few = torch.cat(compressed.everywhere(*blocks), -1)
    own, made = torch.cat([k, v], -1), torch.zeros_like(torch.cat([k, v], -1))
    if few.shape[1]:
        at = torch.searchsorted(compressed.last, rows.tokens).clamp(max=len(compressed) - 1)
        ends = compressed.last[at] == rows.tokens
        made[:, ends] = few[:, at[ends]].to(made.dtype)
    return made, _last_of_layout(own, sizes.length - 1, layout)


def _last_of_layout(x: Tensor, count: int, layout: ShardedLayout) -> Tensor:
    """The last `count` rows of each document of ``x [B, T, …]`` on every rank ``[N, count, …]``, zeros before its
    first."""
    stops = torch.tensor(layout.cu_seqlens[1:], device="cpu")
    places = stops[:, None] - count + torch.arange(count, device="cpu")
    there = places >= torch.tensor(layout.cu_seqlens[:-1], device="cpu")[:, None]
    owners, index = layout.owners_of(torch.where(there, places, 0).flatten())
    out = x.new_zeros(x.shape[0], places.numel(), *x.shape[2:])
    mine = ((owners == layout.rank) & there.flatten()).nonzero().flatten()
    out[:, mine.to(x.device)] = x[:, index[mine].to(x.device)]
    out = layout.cp.comm.all_reduce(out).wait().unflatten(1, (len(stops), count))
    return out[0] if layout.packed else out[:, 0]


def _made(own: Tensor, state: LayerKeys, maps: Maps, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """The same of tokens ``[N, T, Hk, K + V]`` more, which all ranks have."""
    (N, T, Hk, width), before = own.shape, sizes.length - 1
    carried = state.carried
    line = torch.cat([own.new_zeros(N, before, Hk, width) if carried is None else carried.to(own.dtype), own], 1)
    ends = [
        (n, t)
        for n, earlier in enumerate(state.rows.earlier)
        for t in range(T)
        if earlier + t >= before and (earlier + t - before) % sizes.stride == 0
    ]
    made = torch.zeros_like(own)
    if ends:
        n, t = torch.tensor(ends, device=own.device).unbind(1)
        blocks = line[n[:, None], t[:, None] + torch.arange(sizes.length, device=own.device)][None]
        positions = torch.tensor([state.rows.earlier[n] + t - before for n, t in ends], device=own.device)
        K = state.size.key
        both = mapped((blocks[..., :K], blocks[..., K:]), *maps, positions)
        made[n, t] = torch.cat(both, -1)[0].to(made.dtype)
    return made, line[:, T:]


@torch.no_grad()
def attend(q: Tensor, gates: Tensor, state: LayerKeys, sizes: Sizes, window: int, scale: float) -> Tensor:
    """The last T tokens of each sequence, which `keep` has written, by all three branches. Collective.

    Args:
        q: ``[N, T, H, K]``, gates ``[N, T, H, 3]``: the same on all ranks.

    Returns:
        o ``[N, T, H, V]``, the same on all ranks.
    """
    rows, (N, T, H, _), out = state.rows, q.shape, []
    asking, flat = Asking.of(rows, T), q.flatten(0, 1)
    most = max(1, max(rows.lengths) // sizes.stride)
    n = max(1, SCORES // (H * most))
    for a in range(0, N * T, n):
        some = slice(a, min(a + n, N * T))
        numbers = range(a // T, -(-some.stop // T))
        spans = [(i, slice(max(i * T, a) - a, min((i + 1) * T, some.stop) - a)) for i in numbers]
        strip = _KeptQueries(flat[some], asking.cut(some), spans, state, sizes, scale)
        out.append(strip.branches(window))
    o = torch.stack([torch.cat(x) for x in zip(*out)], -2).unflatten(0, (N, T))  # [N, T, H, 3, V]
    return (o * gates.to(o.dtype)[..., None]).sum(-2).to(q.dtype)


@dataclass(frozen=True)
class _KeptQueries:
    """Queries ``[n, H, K]``; `spans`: the sequences' numbers, and which of the queries are of each."""

    q: Tensor
    asking: Asking
    spans: list[tuple[int, slice]]
    state: LayerKeys
    sizes: Sizes
    scale: float

    @property
    def heads(self) -> int:
        """Of one branch."""
        return self.state.size.heads // 3

    def branch(self, i: int) -> LayerKeys:
        return self.state.of(slice(i * self.heads, (i + 1) * self.heads))

    def branches(self, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """o of each branch ``[n, H, V]``."""
        o, lse = self.merged(*self.compressed())
        near = (self.asking.end[:, None] - 1 - torch.arange(window + 1, device=self.q.device)).clamp(min=-1)
        chosen, how = self.choice(lse), (self.scale, self.asking)
        read = own_chosen(self.q, self.branch(1), chosen, self.sizes.block, *how)
        close = own_chosen(self.q, self.branch(2), near[:, None], 1, *how)
        both, _ = self.merged(torch.stack([read[0], close[0]]), torch.stack([read[1], close[1]]))
        return o, both[0], both[1]

    def merged(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The ranks' results put together, in the same order on each."""
        cp = self.state.rows.store.cp
        if cp is None or cp.size == 1:
            return o, lse
        return merged(cp.comm.all_gather(torch.cat([o, lse[..., None]], -1)).wait(), 0)

    def scored(self) -> Iterator[tuple[slice, Ends, Tensor, Tensor]]:
        """For the queries of each sequence in turn: which they are, this rank's compressed keys, their scores
        ``[t, Hk, G, M]``, −∞ where a block ends behind a query, and their values."""
        state, dtype = self.branch(0), wide(self.q.dtype)
        of_rows = _ends(self.state, self.sizes)
        for n, some in self.spans:
            ends = of_rows[n]
            slab, row = (x[None, None].expand(1, self.heads, -1) for x in (ends.slab, ends.row))
            k, v = (x[0] for x in gathered(state, slab, row, dtype))
            grouped = self.q[some].unflatten(1, (self.heads, -1)).to(dtype)
            s = torch.einsum("tgqk,gmk->tgqm", grouped, k) * self.scale
            hidden = ends.place >= self.asking.end[some, None]
            yield some, ends, s.masked_fill(hidden[:, None, None], -torch.inf), v

    def compressed(self) -> tuple[Tensor, Tensor]:
        """What this rank's compressed keys give."""
        o, lse = [], []
        for _, _, s, v in self.scored():
            lse.append(s.logsumexp(-1))
            weights = torch.exp(s - torch.where(torch.isneginf(lse[-1]), 0.0, lse[-1])[..., None])
            o.append(torch.einsum("tgqm,gmv->tgqv", weights, v))
        return torch.cat(o).flatten(1, 2), torch.cat(lse).flatten(1, 2)

    def choice(self, lse: Tensor) -> Tensor:
        """Places of the chosen blocks' first tokens ``[n, Hk, topk]``, as `choice.choose_blocks` has them; −1: none."""
        sizes, cp = self.sizes, self.state.rows.store.cp
        count = -(-max(self.state.rows.lengths) // sizes.block)
        scores = torch.zeros(len(self.q), self.heads, count, dtype=lse.dtype, device=lse.device)
        of_query = torch.where(torch.isneginf(lse), 0.0, lse).unflatten(1, (self.heads, -1))
        for some, ends, s, _ in self.scored():
            p = torch.exp(s - of_query[some][..., None]).sum(2)  # [t, Hk, M]
            for inside in range(0, sizes.length, sizes.stride):
                of_block = (ends.place + 1 - sizes.length + inside) // sizes.block
                scores[some] = scores[some].index_add(-1, of_block, p)
        if cp is not None and cp.size > 1:
            scores = cp.comm.all_gather(scores).wait().sum(0)
        at, own = torch.arange(count, device=lse.device), (self.asking.end[:, None, None] - 1) // sizes.block
        always = (at < sizes.initial) | (at > own - sizes.local)
        scores = scores.masked_fill(always, torch.inf).masked_fill(at > own, -torch.inf)
        best = scores.topk(min(sizes.topk, count), -1)
        places = torch.where(torch.isneginf(best.values), -1, best.indices * sizes.block)
        return pad(places, (0, sizes.topk - places.shape[-1]), value=-1)


def _ends(state: LayerKeys, sizes: Sizes) -> list[Ends]:
    """Of each sequence; made once for all layers of these sizes."""
    rows = state.rows

    def make() -> list[Ends]:
        where, out = Whereabouts.of(rows), []
        for n, held in enumerate(rows.held):
            numbers: list[int] = []
            places: list[int] = []
            before = 0
            for run in held.runs:
                first, period = _first_end(run, sizes), sizes.stride // math.gcd(run.step, sizes.stride)
                if first is not None:
                    numbers += range(before + first, before + len(run), period)
                    places += run[first::period]
                before += len(run)
            at = torch.tensor([numbers], dtype=torch.int64, device=rows.store.device)
            mine = Whereabouts(*(x[n : n + 1] for x in where))
            slab, row = (x[0] for x in mine.memory_of(at))
            out.append(Ends(slab, row, torch.tensor(places, dtype=torch.int64, device=rows.store.device)))
        return out

    return rows.kept((Ends, sizes.length, sizes.stride), make)


def _first_end(run: range, sizes: Sizes) -> int | None:
    """Which of the positions of a run is the first that ends a block."""
    begin = max(0, -(-(sizes.length - 1 - run.start) // run.step))
    some = range(begin, min(begin + sizes.stride, len(run)))
    return next((i for i in some if (run[i] + 1 - sizes.length) % sizes.stride == 0), None)
