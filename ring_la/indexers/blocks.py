"""Blocks chosen by their mean key: MoBA (Lu et al. 2025, arXiv 2502.13189), QSA of Qwen4-Exp; or by their best
one: MiniMax-M3.

    m_n = mean of the keys of block n,    a query reads the `topk` blocks of its document with the largest Σ_h q_hᵀ m_n

Blocks are counted from each document's first token. A query may choose blocks that are full before it; the one it
stands in it always reads, and that counts as one of the `topk`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..context import ShardedLayout
from ..context.handle import layout_of, number_of
from ..errors import ArgumentError
from .arguments import Where, checked, pooled
from .chosen import Chosen, Rows, best, empty_choice


@torch.no_grad()
def block_index(
    q: Tensor,
    k: Tensor,
    size: int,
    topk: int,
    *,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
) -> Chosen:
    """The `topk` blocks that the queries of each key head read, the one they stand in first.

    Args:
        q: ``[B, T, H, K]``. k: ``[B, T, Hk, K]``; query heads of a key head choose together, by their scores' sum. On
            one device k may be of more tokens, of which the queries are the last.
        size: tokens of a block. topk: blocks that a query reads.
        layout: how the sequence is split; block means go to every rank. Collective.
        cu_seqlens: documents on one device.

    Returns:
        Chosen(places int32 ``[B, T, Hk, topk]`` of the blocks' first tokens, scores): with ``block=size`` what
        `sparse_attention` takes. The score of the own block is +∞.

    Raises:
        ArgumentError: by the name of the argument; under a layout on every rank. DisagreementError.
    """
    if torch.compiler.is_compiling():
        return Chosen(*_block_index(q, k, cu_seqlens, number_of(layout), size, topk))

    def check() -> None:
        if len(k) != len(q) or not k.shape[2] or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3]:
            raise ArgumentError("k", f"[B, T, Hk, K] for q {list(q.shape)}, H a multiple of Hk", list(k.shape))
        if k.shape[1] != q.shape[1] and (layout is not None or cu_seqlens is not None or k.shape[1] < q.shape[1]):
            raise ArgumentError("k", f"as many tokens as q, {q.shape[1]}", k.shape[1])

    checked("block_index", dict(q=(q, 4), k=(k, 4)), (layout, cu_seqlens), check, size=size, topk=topk)
    rows = Rows.of(q, layout, cu_seqlens, k if layout is None else None)
    blocks = Blocks.of(size, rows)
    means = blocks.means(k)

    def score(strip: slice, some: slice) -> Tensor:
        grouped = q[:, strip].to(means.dtype).unflatten(2, (k.shape[2], -1)).sum(3)  # Σ_h (q_h·m) = (Σ_h q_h)·m
        s = torch.einsum("bngk,bmgk->bngm", grouped, means[:, some])
        at, own = blocks.number[some], blocks.own[strip, None]
        s = s.masked_fill(~((at < own) & (at >= blocks.of_document[strip, None]))[None, :, None], -torch.inf)
        return s.masked_fill((at == own)[None, :, None], torch.inf)

    out = best(score, len(blocks), blocks.ends, (q.shape[0], k.shape[2]), topk)
    return Chosen(blocks.places(out.places), out.scores)


@torch.no_grad()
def full_block_index(
    q: Tensor,
    k: Tensor,
    size: int,
    topk: int,
    *,
    pool: Callable[[Tensor, Tensor], Tensor] | None = None,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
) -> Chosen:
    """QSA's choice (Qwen4-Exp): the `topk` blocks full up to a query with the largest  Σ_h relu(q_hᵀ m_n),  and the
    block it stands in if that is not full yet.

    Args:
        q: index queries ``[B, T, Hi, D]``, rotated. k: index keys ``[B, T, D]``, not rotated.
        pool: makes of means ``[B, blocks, D]``, in the dtype of k, and the places of the blocks' first tokens
            ``[blocks]`` what queries are compared with (a norm, a rotation). The same on all ranks, each block by
            itself; under torch.compile the last block comes several times. None: the means.
        size, topk, layout, cu_seqlens: as `block_index`.

    Returns:
        Chosen(places int32 ``[B, T, 1, topk + 1]`` of the blocks' first tokens, the own one last, scores).

    Raises:
        ArgumentError: by the name of the argument; under a layout on every rank. DisagreementError.
    """
    if torch.compiler.is_compiling():
        number = number_of(layout)
        means, first = _block_means(k, cu_seqlens, number, size, _room(k, size, layout, cu_seqlens))
        keys = means if pool is None else pool(means.to(k.dtype), first).to(means.dtype)
        return Chosen(*_full_blocks(q, keys, cu_seqlens, number, size, topk))
    _check_one_key("full_block_index", q, k, (layout, cu_seqlens), size=size, topk=topk)
    rows = Rows.of(q, layout, cu_seqlens)
    blocks = Blocks.of(size, rows)
    means = blocks.means(k[:, :, None])[:, :, 0]
    keys = means if pool is None else pooled(pool, means.to(k.dtype), blocks.first, layout).to(means.dtype)
    return _best_full(q, keys, size, topk, rows, blocks)


def _best_full(q: Tensor, keys: Tensor, size: int, topk: int, rows: Rows, blocks: Blocks) -> Chosen:
    """`full_block_index` of what blocks are compared by."""

    def score(strip: slice, some: slice) -> Tensor:
        s = torch.relu(torch.einsum("bnhd,bmd->bnhm", q[:, strip].to(keys.dtype), keys[:, some])).sum(2)
        full = (blocks.first[some] + size - 1 <= rows.tokens[strip, None]) & (blocks.whole[some])
        here = blocks.number[some] >= blocks.of_document[strip, None]
        return s.masked_fill(~(full & here)[None], -torch.inf)[:, :, None]

    out = best(score, len(blocks), blocks.ends, (q.shape[0], q.shape[2]), topk)
    own = blocks.first[blocks.own]
    return _with_last(blocks.places(out.places), out.scores, torch.where(rows.tokens - own == size - 1, -1, own))


@torch.no_grad()
def best_key_index(
    q: Tensor,
    k: Tensor,
    size: int,
    topk: int,
    *,
    local: int = 1,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
) -> Chosen:
    """MiniMax-M3's choice: the `topk` blocks with the best single key,  max_{j in n, j ≤ i} q_iᵀ k_j,  for each head.

    Args:
        q: index queries ``[B, T, Hk, D]``, a head for each key head of attention. k: ``[B, T, D]``, which go to every
            rank. Both rotated.
        local: the own block and the `local` − 1 before it are read in any case, and count as some of the `topk`.
        size, topk, layout, cu_seqlens: as `block_index`.

    Returns:
        Chosen(places int32 ``[B, T, Hk, topk]`` of the blocks' first tokens, scores, +∞ for local blocks).

    Raises:
        ArgumentError: by the name of the argument; under a layout on every rank. DisagreementError.
    """
    if torch.compiler.is_compiling():
        return Chosen(*_best_key(q, k, cu_seqlens, number_of(layout), size, topk, local))
    _check_one_key("best_key_index", q, k, (layout, cu_seqlens), size=size, topk=topk, local=local)
    rows = Rows.of(q, layout, cu_seqlens)
    blocks, keys, wide = Blocks.of(size, rows), rows.gather(k), torch.promote_types(q.dtype, torch.float32)
    of_token = torch.searchsorted(blocks.first, torch.arange(rows.total, device=q.device), right=True) - 1

    def score(strip: slice, some: slice) -> Tensor:
        tokens = slice(blocks.borders[some.start], blocks.borders[some.stop])
        s = torch.einsum("bnhd,bmd->bnhm", q[:, strip].to(wide), keys[:, tokens].to(wide))
        at = torch.arange(tokens.start, tokens.stop, device=q.device)
        seen = (at <= rows.tokens[strip, None]) & (at >= rows.starts[strip, None])
        s = s.masked_fill(~seen[None, :, None], -torch.inf)
        largest = _largest(s, of_token[tokens] - some.start, some.stop - some.start)
        return largest.masked_fill(_near(blocks, strip, some, local)[None, :, None], torch.inf)

    out = best(score, len(blocks), blocks.ends, (q.shape[0], q.shape[2]), topk, size)
    return Chosen(blocks.places(out.places), out.scores)


class Blocks:
    """The blocks of all documents, by number.

    Attributes:
        first, end: their first tokens, and where they end. whole: whether they have `size` tokens. number: 0, 1, …
        own, of_document: for each of this rank's tokens the number of its block, and of the first one of its document.
        borders, ends: on the host, where blocks begin and the last one ends; and for each token the number after `own`.
    """

    def __init__(self, size: int, rows: Rows) -> None:
        documents, device = zip(rows.cu_seqlens, rows.cu_seqlens[1:]), rows.tokens.device
        both = [(a, min(a + size, stop)) for start, stop in documents for a in range(start, stop, size)]
        self.rows, self.borders = rows, [*(a for a, _ in both), rows.total]
        self.ends = torch.searchsorted(torch.tensor(self.borders[:-1], device="cpu"), rows.last, right=True)
        self.first, self.end = (torch.tensor(x, device=device) for x in zip(*both))
        self.whole = self.end - self.first == size
        self.number = torch.arange(len(both), device=device)
        self.own = (self.ends - 1).to(device)
        self.of_document = torch.searchsorted(self.first, rows.starts)

    @classmethod
    def of(cls, size: int, rows: Rows) -> Blocks:
        """Made once a layout."""
        make = functools.partial(cls, size, rows)
        return make() if rows.layout is None else rows.layout.kept(cls, make, size)

    def __len__(self) -> int:
        return len(self.number)

    def means(self, k: Tensor) -> Tensor:
        """The mean key of each block on every rank, wide ``[B, blocks, Hk, K]``: each rank adds up what it has."""
        wide = torch.promote_types(k.dtype, torch.float32)
        sums = torch.zeros(k.shape[0], len(self), *k.shape[2:], dtype=wide, device=k.device)
        own = self.own
        if k.shape[1] != len(own):  # queries are the last tokens alone
            own = torch.searchsorted(self.first, torch.arange(k.shape[1], device=k.device), right=True) - 1
        sums.index_add_(1, own, k.to(wide))
        if self.rows.layout is not None:
            sums = self.rows.layout.cp.comm.all_reduce(sums).wait()
        return sums / (self.end - self.first)[:, None, None]

    def places(self, numbers: Tensor) -> Tensor:
        """The first tokens of blocks by number, int32; −1 for −1."""
        return torch.where(numbers < 0, -1, self.first[numbers.clamp(min=0)]).int()


def _check_one_key(call: str, q: Tensor, k: Tensor, where: Where, **counts: int) -> None:
    def check() -> None:
        if list(k.shape) != [*q.shape[:2], q.shape[3]]:
            raise ArgumentError("k", f"[B, T, D] for q {list(q.shape)}", list(k.shape))

    checked(call, dict(q=(q, 4), k=(k, 3)), where, check, **counts)


def _with_last(places: Tensor, scores: Tensor, last: Tensor) -> Chosen:
    """A choice ``[B, T, heads, n]`` and one more place a token, `last` ``[T]`` (−1: none), read in any case."""
    tail = last.int()[None, :, None, None].expand(len(places), -1, -1, -1)
    sure = torch.where(tail < 0, -torch.inf, torch.inf).to(scores.dtype)
    return Chosen(torch.cat([places, tail], -1), torch.cat([scores, sure], -1))


def _near(blocks: Blocks, strip: slice, some: slice, local: int) -> Tensor:
    """Which of the blocks `some` are a query's own or the `local` − 1 before it."""
    number, own = blocks.number[some], blocks.own[strip, None]
    return (number <= own) & (number > own - local) & (number >= blocks.of_document[strip, None])


def _largest(s: Tensor, block: Tensor, count: int) -> Tensor:
    """The largest of scores ``[…, keys]`` in each of `count` blocks, the keys' blocks given."""
    return s.new_full((*s.shape[:3], count), -torch.inf).scatter_reduce_(-1, block.expand_as(s), s, "amax")


# -- calls within a compiled graph: operators without gradients; layouts by number ------------------------------


@torch.library.custom_op("ring_la::block_index", mutates_args=())
def _block_index(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, layout: int, size: int, topk: int
) -> tuple[Tensor, Tensor]:
    return block_index(q, k, size, topk, layout=layout_of(layout), cu_seqlens=cu_seqlens)


_block_index.register_fake(lambda q, k, cu, layout, size, topk: empty_choice(q, k, k.shape[2], topk))


@torch.library.custom_op("ring_la::best_key_index", mutates_args=())
def _best_key(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, layout: int, size: int, topk: int, local: int
) -> tuple[Tensor, Tensor]:
    return best_key_index(q, k, size, topk, local=local, layout=layout_of(layout), cu_seqlens=cu_seqlens)


_best_key.register_fake(lambda q, k, cu, layout, size, topk, local: empty_choice(q, q, q.shape[2], topk))


def _room(k: Tensor, size: int, layout: ShardedLayout | None, cu_seqlens: Tensor | None) -> int:
    """At least the blocks of all documents."""
    if layout is not None:
        return layout.seq_len // size + layout.num_documents
    return k.shape[1] // size + (1 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


@torch.library.custom_op("ring_la::block_means", mutates_args=())
def _block_means(k: Tensor, cu_seqlens: Tensor | None, layout: int, size: int, room: int) -> tuple[Tensor, Tensor]:
    """Means ``[B, room, D]`` and first tokens ``[room]`` of blocks, the last one again in the places that are left."""
    blocks = Blocks.of(size, Rows.of(k, layout_of(layout), cu_seqlens))
    at = torch.arange(room, device=k.device).clamp_(max=len(blocks) - 1)
    return blocks.means(k[:, :, None])[:, at, 0], blocks.first[at]


@_block_means.register_fake
def _(k: Tensor, cu_seqlens: Tensor | None, layout: int, size: int, room: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(k.dtype, torch.float32)
    return k.new_empty(k.shape[0], room, k.shape[2], dtype=wide), k.new_empty(room, dtype=torch.int64)


@torch.library.custom_op("ring_la::full_block_index", mutates_args=())
def _full_blocks(
    q: Tensor, keys: Tensor, cu_seqlens: Tensor | None, layout: int, size: int, topk: int
) -> tuple[Tensor, Tensor]:
    rows = Rows.of(q, layout_of(layout), cu_seqlens)
    return _best_full(q, keys, size, topk, rows, Blocks.of(size, rows))


_full_blocks.register_fake(lambda q, keys, cu, layout, size, topk: empty_choice(q, keys, 1, topk + 1))
