"""One token of each sequence, or some, over the keys it has chosen, which stay on the ranks that read them.

    place of a key   its position in its sequence, the same on all ranks; a rank has those in the runs of its `Held`
    choice           each rank scores its own index keys and keeps its best; one all-gather of these, and all ranks keep
                     the same best of all

What a rank reads goes with the choice, whatever the sequences' lengths; what it scores, with its own part of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_int
from ..errors import ArgumentError, describe_tensor
from ..indexers.chosen import Chosen
from ..softmax.merging import wide
from .store import KeyRows, LayerKeys
from .whereabouts import Whereabouts

NUMBERS = 1 << 27
"""Numbers of chosen keys that exist at once, beside one sequence's."""
SCORES = 1 << 24
"""Scores of kept keys that exist at once, beside one token's."""


class Asking(NamedTuple):
    """Queries that read what stands before them.

    Attributes:
        row: the sequence of each, int64 ``[n]``. end: the tokens of it that one sees, ``[n]``.
    """

    row: Tensor
    end: Tensor

    @classmethod
    def of(cls, rows: KeyRows, last: int = 1) -> Asking:
        """The `last` tokens of each sequence, in order; made once a step."""

        def make() -> Asking:
            device, n = rows.store.device, len(rows)
            end = torch.tensor(rows.lengths, device=device)[:, None] - torch.arange(last, device=device).flip(0)
            return cls(torch.arange(n, device=device).repeat_interleave(last), end.flatten())

        return rows.kept((cls, last), make)

    def cut(self, some: slice) -> Asking:
        return Asking(self.row[some], self.end[some])


def own_chosen(
    q: Tensor, state: LayerKeys, chosen: Tensor, block: int, scale: float, asking: Asking | None = None
) -> tuple[Tensor, Tensor]:
    """What this rank's keys give ``q [n, H, K]`` of those chosen ``[n, heads or 1, S]``: o ``[n, H, V]`` and lse
    ``[n, H]``, wide. Without `asking` they are the last tokens of the sequences, as many of each."""
    heads, key, value = state.size
    asking = Asking.of(state.rows, len(q) // len(state.rows)) if asking is None else asking
    each = chosen.shape[2] * block * heads * (key + value)
    n = max(1, NUMBERS // max(1, each))
    strips = [slice(a, a + n) for a in range(0, len(q), n)]
    parts = [_strip(q[x], state, chosen[x], block, scale, asking.cut(x)) for x in strips]
    o, lse = (torch.cat(x) for x in zip(*parts))
    return o, lse


def _strip(
    q: Tensor, state: LayerKeys, chosen: Tensor, block: int, scale: float, asking: Asking
) -> tuple[Tensor, Tensor]:
    """`own_chosen` of some queries."""
    heads, rows = state.size.heads, state.rows
    where = Whereabouts(*(x[asking.row] for x in Whereabouts.of(rows)))
    inside = torch.arange(block, device=q.device)
    places = torch.where(chosen[..., None] < 0, -1, chosen[..., None].long() + inside).flatten(2)  # [n, h, M]
    numbers, here = where.rows_of(places.flatten(1), asking.end)
    slab, row = (x.view(places.shape).expand(-1, heads, -1) for x in where.memory_of(numbers))
    here = here.view(places.shape).expand(-1, heads, -1)
    k, v = gathered(state, slab, row, wide(q.dtype))
    scores = torch.einsum("ngqk,ngmk->ngqm", q.unflatten(1, (heads, -1)).to(k.dtype), k) * scale
    scores = scores.masked_fill(~here[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(torch.isneginf(lse), 0.0, lse)[..., None])
    return torch.einsum("ngqm,ngmv->ngqv", weights, v).flatten(1, 2), lse.flatten(1, 2)


def gathered(state: LayerKeys, slab: Tensor, row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values ``[n, heads, M, ·]`` of tokens in memory, those of no slab zero."""
    heads, key, value = state.size
    head = torch.arange(heads, device=row.device)[:, None]
    out = [torch.zeros(*row.shape, width, dtype=dtype, device=row.device) for width in (key, value)]
    for number in state.rows.store.k[state.layer]:
        mine = (slab == number)[..., None]
        at = torch.where(mine[..., 0], row, 0)
        for x, memory in zip(out, state.memory(number)):
            if x.shape[-1]:
                torch.where(mine, memory[at, head].to(dtype), x, out=x)
    return out[0], out[1] if value else out[0]


@torch.no_grad()
def decode_index(q: Tensor, w: Tensor, state: LayerKeys, topk: int) -> Chosen:
    """The tokens that the last tokens of each sequence read, by DeepSeek-V3.2's lightning indexer
    (`ring_la.indexers.lightning_index`), over index keys that stay on their ranks. Collective.

    Args:
        q: ``[N, T, Hi, D]``, rotated; w: ``[N, T, Hi]``, scales included: of the last T tokens of each sequence, in
            decoding one, the same on all ranks. state: index keys, of KeySize(1, D, 0); these tokens' are among them.
        topk: how many one reads.

    Returns:
        Chosen(places int32 ``[N, T, 1, topk]``, positions in the sequence, the same on all ranks, −1 where there are
        fewer; scores). Sent: ``2 · N · T · topk`` numbers to each other rank.

    Raises:
        ArgumentError: by name.
    """
    rows, (heads, key, value) = state.rows, state.size
    if heads != 1 or value:
        raise ArgumentError("state", "index keys: KeySize(1, D, 0)", state.size)
    if not isinstance(q, Tensor) or q.dim() != 4 or (len(q), q.shape[3]) != (len(rows), key):
        raise ArgumentError("q", f"[{len(rows)}, T, heads, {key}]", describe_tensor(q))
    if not isinstance(w, Tensor) or w.shape != q.shape[:3]:
        raise ArgumentError("w", f"{list(q.shape[:3])}", describe_tensor(w))
    check_int("topk", topk, 1)
    scores, places = _best_here(q, w, state, topk)
    comm = None if rows.store.cp is None else rows.store.cp.comm
    if comm is not None and comm.size > 1:
        scores, places = (torch.cat([*comm.all_gather(x).wait()], -1) for x in (scores, places))
    scores, order = scores.topk(topk, -1)
    places = torch.where(torch.isneginf(scores), -1, places.gather(-1, order))
    return Chosen(places[:, :, None].int(), scores[:, :, None])


def _best_here(q: Tensor, w: Tensor, state: LayerKeys, topk: int) -> tuple[Tensor, Tensor]:
    """Of this rank's index keys the best of each token ``[N, T, topk]``: scores, −∞ where there are fewer; places."""
    dtype, rows, (N, T) = wide(q.dtype), state.rows, q.shape[:2]
    scores = torch.full((N, T, topk), -torch.inf, dtype=dtype, device=q.device)
    numbers = torch.zeros(N, T, topk, dtype=torch.int64, device=q.device)
    for n, held in enumerate(rows.held):
        if not held.here:
            continue
        keys = [state.views(span)[0][:, 0] for span in held.spans(0, held.here)]
        for some in _strips(T, held.here * q.shape[2]):
            parts = [_weighted(q[n, some].to(dtype), w[n, some].to(dtype), k.to(dtype)) for k in keys]
            best = _not_after(torch.cat(parts, -1), n, some, T, rows).topk(min(topk, held.here), -1)
            m = best.values.shape[-1]
            scores[n, some, :m], numbers[n, some, :m] = best
    places = Whereabouts.of(rows).places_of(numbers.flatten(1))
    return scores, places.view(numbers.shape)


def _weighted(q: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """Scores ``[t, m]`` of ``q [t, Hi, D]``, ``w [t, Hi]`` and ``k [m, D]``."""
    return (w[:, None] @ torch.relu(q @ k.mT))[:, 0]


def _not_after(s: Tensor, n: int, some: slice, T: int, rows: KeyRows) -> Tensor:
    """Scores ``[t, here]`` of this rank's keys of sequence n, those behind a token out; one token more sees all."""
    if T == 1:
        return s
    where, here = Whereabouts(*(x[n : n + 1] for x in Whereabouts.of(rows))), torch.arange(s.shape[1], device=s.device)
    end = Asking.of(rows, T).end.view(-1, T)[n, some]
    return s.masked_fill(where.places_of(here[None]) >= end[:, None], -torch.inf)


def _strips(T: int, each: int) -> list[slice]:
    """T tokens, each of so many scores, some at a time."""
    n = max(1, SCORES // max(1, each))
    return [slice(a, min(a + n, T)) for a in range(0, T, n)]


@torch.no_grad()
def decode_blocks(q: Tensor, state: LayerKeys, size: int, topk: int) -> Chosen:
    """The blocks that the last tokens of each sequence read, by their mean keys (MoBA, `ring_la.indexers.block_index`),
    over keys that stay on their ranks. Collective.

    A score is a mean of scores, ``Σ_h q_hᵀ m_n = mean_j (Σ_h q_h)ᵀ k_j``: each rank adds up those of its own keys, all
    of which it reads, and no mean is kept.

    Args:
        q: ``[N, T, H, K]``, the last T tokens of each sequence, in decoding one, the same on all ranks. state: keys;
            these tokens' are among them. size: tokens of a block. topk: blocks one reads, its own among them.

    Returns:
        Chosen(places int32 ``[N, T, heads, topk]`` of the blocks' first tokens, the own one first, the same on all
        ranks; scores), for `decode_attention` with ``block=size``. Sent: ``N · T · heads · blocks`` numbers to each
        other rank.

    Raises:
        ArgumentError: by name.
    """
    rows, (heads, key, _) = state.rows, state.size
    if not isinstance(q, Tensor) or q.dim() != 4 or len(q) != len(rows) or q.shape[2] % heads:
        raise ArgumentError("q", f"[{len(rows)}, T, a multiple of {heads}, {key}]", describe_tensor(q))
    for name, n in (("size", size), ("topk", topk)):
        check_int(name, n, 1)
    summed = q.to(wide(q.dtype)).unflatten(2, (heads, -1)).sum(3)
    scores = _sums_by_block(summed, state, size)
    comm = None if rows.store.cp is None else rows.store.cp.comm
    if comm is not None and comm.size > 1:
        scores = comm.all_gather(scores).wait().sum(0)
    own = ((Asking.of(rows, q.shape[1]).end - 1) // size).view(len(rows), -1, 1, 1)
    at = torch.arange(scores.shape[-1], device=q.device)
    scores = (scores / size).masked_fill(at == own, torch.inf).masked_fill(at > own, -torch.inf)
    missing = (0, max(0, topk - scores.shape[-1]))
    scores, blocks = torch.nn.functional.pad(scores, missing, value=-torch.inf).topk(topk, -1)
    places = torch.where(torch.isneginf(scores), -1, blocks * size)
    return Chosen(places.int(), scores)


def _sums_by_block(q: Tensor, state: LayerKeys, size: int) -> Tensor:
    """Of this rank's keys ``q [N, T, heads, K]`` times each, added up by blocks ``[N, T, heads, blocks]``. Of blocks
    before a token's own all keys stand before it."""
    rows = state.rows
    out = q.new_zeros(*q.shape[:3], -(-max(rows.lengths, default=0) // size))
    most = max(held.here for held in rows.held)
    places = Whereabouts.of(rows).places_of(torch.arange(most, device=q.device).expand(len(q), -1).contiguous())
    for n, held in enumerate(rows.held):
        keys = [state.views(span)[0].to(q.dtype) for span in held.spans(0, held.here)]
        for some in _strips(q.shape[1], held.here * q.shape[2]) if keys else []:
            parts = [torch.einsum("tgk,mgk->tgm", q[n, some], k) for k in keys]
            out[n, some] = out[n, some].index_add(2, places[n, : held.here] // size, torch.cat(parts, 2))
    return out
