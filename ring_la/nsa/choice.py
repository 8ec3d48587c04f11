"""Which blocks a query reads: those whose tokens it gives most through the compressed keys
(arXiv 2502.11089, eq. 8 to 12).

    p_ti = exp(s_ti − lse_t) summed over the query heads of a key head,      i compressed blocks
    score of block j = Σ p_ti over the strides of tokens that i and j share

The first `initial` blocks of a document and the last `local` ones up to a query's own are read in any case.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from ..indexers.blocks import Blocks
from ..indexers.chosen import Chosen, Rows, best
from .compressed import Compressed


class Sizes(NamedTuple):
    """Of the blocks: see `nsa`."""

    length: int
    stride: int
    block: int
    topk: int
    initial: int
    local: int


@torch.no_grad()
def choose_blocks(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, sizes: Sizes, rows: Rows, compressed: Compressed
) -> Tensor:
    """Places of the chosen blocks' first tokens, int32 ``[B, T, Hk, topk]``; −1: none.

    q ``[B, T, H, K]``, compressed k ``[B, N, Hk, K]``, lse ``[B, H, T]`` of attention to them. Scores are formed for
    some queries and some blocks at a time.
    """
    blocks, wide = Blocks.of(sizes.block, rows), lse.dtype
    (B, _, H, _), Hk, first = q.shape, k.shape[2], compressed.first.tolist()
    shares = _shares(sizes, blocks, compressed)
    of_query = torch.where(torch.isneginf(lse), 0.0, lse).mT.unflatten(2, (Hk, -1))  # [B, T, Hk, G]

    def score(strip: slice, some: slice) -> Tensor:
        a = bisect_right(first, blocks.borders[some.start] - sizes.length)
        b = bisect_left(first, blocks.borders[some.stop])
        grouped = q[:, strip].to(wide).unflatten(2, (Hk, -1))
        s = scale * torch.einsum("bnhgd,bmhd->bnhgm", grouped, k[:, a:b].to(wide)) - of_query[:, strip, :, :, None]
        last = compressed.last[a:b]
        seen = (last <= rows.tokens[strip, None]) & (last >= rows.starts[strip, None])
        p = torch.exp(s.masked_fill(~seen[None, :, None, None], -torch.inf)).sum(3)
        out = p.new_zeros(*p.shape[:3], some.stop - some.start)
        for share in shares:
            at = share[a:b] - some.start
            inside = (at >= 0) & (at < out.shape[-1])
            out.index_add_(-1, at[inside], p[..., inside])
        at, own, begin = blocks.number[some], blocks.own[strip, None], blocks.of_document[strip, None]
        readable = (at <= own) & (at >= begin)
        always = readable & ((at < begin + sizes.initial) | (at > own - sizes.local))
        out = out.masked_fill(~readable[None, :, None], -torch.inf)
        return out.masked_fill(always[None, :, None], torch.inf)

    each = -(-sizes.block // sizes.stride) * (H // Hk)
    found: Chosen = best(score, len(blocks), blocks.ends, (B, Hk), sizes.topk, each)
    return blocks.places(found.places)


def _shares(sizes: Sizes, blocks: Blocks, compressed: Compressed) -> list[Tensor]:
    """For the n-th stride of tokens of every compressed block the number of the block that it lies in ``[N]``."""
    device, tokens = blocks.first.device, compressed.first.to(blocks.first.device)
    begins = range(0, sizes.length if len(compressed) else 0, sizes.stride)
    return [torch.searchsorted(blocks.first, (tokens + n).to(device), right=True) - 1 for n in begins]
