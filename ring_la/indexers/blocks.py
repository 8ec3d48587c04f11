"""Blocks chosen by their mean key: MoBA (Lu et al. 2025, arXiv 2502.13189), and what NSA and QSA select by.

    m_n = mean of the keys of block n,    a query reads the `topk` blocks of its document with the largest Σ_h q_hᵀ m_n

Blocks are counted from each document's first token. A query may choose blocks that are full before it; the one it
stands in it always reads, and that counts as one of the `topk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..context import ShardedLayout
from ..errors import ArgumentError
from .chosen import Chosen, Rows, best


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
        q: ``[B, T, H, K]``. k: ``[B, T, Hk, K]``; query heads of a key head choose together, by their scores' sum.
        size: tokens of a block. topk: blocks that a query reads.
        layout: how the sequence is split; block means go to every rank. Collective.
        cu_seqlens: documents on one device.

    Returns:
        Chosen(places int32 ``[B, T, Hk, topk]`` of the blocks' first tokens, scores): with ``block=size`` what
        `sparse_attention` takes. The score of the own block is +∞.

    Raises:
        ArgumentError: by the name of the argument.
    """
    for name, x in (("size", size), ("topk", topk)):
        if not isinstance(x, int) or x < 1:
            raise ArgumentError(name, "an int ≥ 1", repr(x))
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3]:
        raise ArgumentError("k", f"[B, T, Hk, K] for q {list(q.shape)}, H a multiple of Hk", list(k.shape))
    rows = Rows(q.shape[1], layout, cu_seqlens, q.device)
    blocks = _blocks(rows.cu_seqlens, size)
    first, end = (torch.tensor(x, device=q.device) for x in zip(*blocks))
    means = block_means(k, first, end, rows)
    own = torch.searchsorted(first, rows.tokens, right=True) - 1
    of_document = torch.searchsorted(first, rows.starts)
    number, wide = torch.arange(len(blocks), device=q.device), means.dtype

    def score(strip: slice, some: slice) -> Tensor:
        grouped = q[:, strip].to(wide).unflatten(2, (k.shape[2], -1)).sum(3)  # Σ_h (q_h·m) = (Σ_h q_h)·m
        s = torch.einsum("bngk,bmgk->bngm", grouped, means[:, some])
        at = number[some]
        earlier = (at < own[strip, None]) & (at >= of_document[strip, None])
        s = s.masked_fill(~earlier[None, :, None], -torch.inf)
        return s.masked_fill((at == own[strip, None])[None, :, None], torch.inf)

    out = best(score, len(blocks), own.cpu() + 1, (q.shape[0], k.shape[2]), topk)
    places = torch.where(out.places < 0, -1, first[out.places.clamp(min=0)].int())
    return Chosen(places, out.scores)


def _blocks(cu_seqlens: tuple[int, ...], size: int) -> list[tuple[int, int]]:
    """First token of each block, and its end."""
    documents = zip(cu_seqlens, cu_seqlens[1:])
    return [(a, min(a + size, stop)) for start, stop in documents for a in range(start, stop, size)]


def block_means(k: Tensor, first: Tensor, end: Tensor, rows: Rows) -> Tensor:
    """The mean key of each block on every rank, wide ``[B, blocks, Hk, K]``: each rank adds up what it has."""
    wide = torch.promote_types(k.dtype, torch.float32)
    own = torch.searchsorted(first, rows.tokens, right=True) - 1
    sums = torch.zeros(k.shape[0], len(first), *k.shape[2:], dtype=wide, device=k.device)
    sums.index_add_(1, own, k.to(wide))
    if rows.layout is not None:
        sums = rows.layout.cp.comm.all_reduce(sums).wait()
    return sums / (end - first)[:, None, None]
