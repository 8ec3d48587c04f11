"""More tokens of sequences under a layout: their queries go from rank to rank, keys stay where they are.

New tokens see each other as in `ring_la.attention`. What stands before them is on all ranks: in round s every rank
sends its queries to the rank s further on, computes what its own keys give those it got, and sends that back. So a rank
holds the queries of one other at a time, and what travels goes with the new tokens, however many are before them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Group
from ..context import ShardedLayout
from ..outputs import AttentionOutput
from ..softmax import attention
from ..softmax.merging import Partial, wide
from .pages import Held
from .store import LayerKeys

QUERIES = 1024
"""Queries of a window whose scores exist at once."""


@torch.no_grad()
def read_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LayerKeys,
    layout: ShardedLayout,
    *,
    window: int = -1,
    scale: float | None = None,
) -> AttentionOutput:
    """Causal softmax attention of new tokens to each other and to those before them. Collective, without gradients.

    Args:
        q: ``[B, T_local, H, K]``. k, v: ``[B, T_local, heads, ·]``; they are put into `state`.
        state: of rows that are `extended` by `layout`.
        window: earlier tokens a token sees; −1: all.
        scale: multiplies ``qᵀk``; None: K**-0.5.

    Returns:
        AttentionOutput(o ``[B, T_local, H, V]``, lse ``[B, H, T_local]``).
    """
    state.put(k, v)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    o, lse = attention(q, k, v, window=(window, -1), layout=layout, scale=factor)
    if not any(state.rows.earlier):
        return AttentionOutput(o, lse)
    out, comm = Partial(tuple(o.shape), q.dtype, q.device), layout.cp.comm
    out.add(o, lse)
    for s in range(comm.size):
        to, source = (comm.rank + s) % comm.size, (comm.rank - s) % comm.size
        theirs = q if s == 0 else q.new_empty(q.shape[0], layout.lengths[source], *q.shape[2:])
        if s:
            _swap(comm, {to: q}, {source: theirs})
        part = _earlier(theirs, state, layout.positions_of(layout.tokens(source)), window, factor)
        if s:
            back = part.new_empty(*q.shape[:3], part.shape[3])
            _swap(comm, {source: part}, {to: back})
            part = back
        out.add(part[..., :-1], part[..., -1].transpose(1, 2))
    return AttentionOutput(*out.result())


def _swap(comm: Group, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
    """Send and receive what is not empty: a rank may have no token of a short piece."""
    sends, receives = ({r: x for r, x in side.items() if x.numel()} for side in (sends, receives))
    if sends or receives:
        comm.exchange(sends, receives).wait()


def _earlier(q: Tensor, state: LayerKeys, positions: Tensor, window: int, scale: float) -> Tensor:
    """What this rank's earlier keys give queries at `positions` after them: ``[B, T, H, V + 1]`` wide, lse last."""
    B, T, H, _ = q.shape
    dtype = wide(q.dtype)
    out = torch.zeros(B, T, H, state.size.value + 1, dtype=dtype, device=q.device)
    out[..., -1] = -torch.inf
    for b, (held, length, here) in enumerate(zip(state.rows.held, state.rows.earlier, state.rows.here)):
        at = positions + length
        some: slice | Tensor
        if window < 0:
            some, part = slice(0, T), Partial((1, T, H, state.size.value), q.dtype, q.device)
            for span in held.spans(0, here) if T else ():
                k, v = (x.to(q.dtype)[None] for x in state.views(span))
                part.add(*attention(q[b : b + 1], k, v, causal=False, scale=scale))
        else:
            near = (at - window < length).nonzero().flatten()
            some = near.to(q.device)
            part = _in_window(q[b, some], state, held, here, at[near], window, scale)
        if not part.empty:
            o, lse = part.result()
            out[b, some] = torch.cat([o[0].to(dtype), lse[0].mT[..., None]], -1)
    return out


def _in_window(q: Tensor, state: LayerKeys, held: Held, here: int, at: Tensor, window: int, scale: float) -> Partial:
    """What queries ``[T, H, K]`` at positions `at` get from earlier keys that are no further off than `window`."""
    heads, _, value = state.size
    part = Partial((1, len(q), q.shape[1], value), q.dtype, q.device)
    if not len(q):
        return part
    first = held.before(int(at.min()) - window)
    spans = held.spans(min(first, here), here)
    if not spans:
        return part
    k, v = (torch.cat(x).to(wide(q.dtype)) for x in zip(*map(state.views, spans)))
    places = torch.tensor([p for run in held.runs for p in run][first:here])
    for a in range(0, len(q), QUERIES):
        rows = q[a : a + QUERIES].unflatten(1, (heads, -1)).to(k.dtype)
        scores = torch.einsum("thgk,nhk->hgtn", rows, k) * scale
        seen = places >= at[a : a + QUERIES, None] - window
        scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
        lse = scores.logsumexp(-1)
        safe = torch.where(torch.isneginf(lse), 0.0, lse)
        o = torch.einsum("hgtn,nhv->thgv", torch.exp(scores - safe[..., None]), v).flatten(1, 2)
        part.add(o[None].to(q.dtype), lse.flatten(0, 1)[None], slice(a, a + len(rows)))
    return part
