"""More tokens of sequences under a layout: their queries go from rank to rank, keys stay where they are.

New tokens see each other as in `ring_la.attention`. What stands before them is on all ranks: in round s every rank
sends its queries to the rank s further on, computes what its own keys give those it got, and sends that back. So a rank
holds the queries of one other at a time, and what travels goes with the new tokens, however many are before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_kind
from ..comm import Group
from ..context import ShardedLayout
from ..outputs import AttentionOutput
from ..softmax import attention, mla
from ..softmax.merging import Partial, wide
from .decode import beside_sinks
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
    check_kind("state", state, LayerKeys)
    new = attention(q, k, v, window=(window, -1), layout=layout, scale=scale)
    state.put(k, v)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    return with_earlier(q, new, state, layout, window=window, scale=factor)


@torch.no_grad()
def with_earlier(
    q: Tensor,
    new: AttentionOutput,
    state: LayerKeys,
    layout: ShardedLayout,
    *,
    window: int = -1,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> AttentionOutput:
    """What new tokens get of each other together with what those before them give. Collective, without gradients.

    Args:
        q: ``[B, T_local, H, K]``. new: o ``[B, T_local, H, V]`` and lse ``[B, H, T_local]`` of each other, without
            sinks. state: keys and values, `earlier` of them before these tokens.
        window, scale: as in `read_attention`. softcap, sinks: as in `ring_la.attention`.

    Returns:
        AttentionOutput, as `new`.
    """
    o, lse = new.o, new.lse
    if any(state.rows.earlier):
        out = Partial(tuple(o.shape), q.dtype, q.device)
        out.add(o, lse)
        for part in _parts(q, state, layout, EarlierScores(scale, window, softcap)):
            out.add(part[..., :-1], part[..., -1].transpose(1, 2))
        o, lse = out.result()
    if sinks is not None:
        beside, total = beside_sinks(o.to(lse.dtype), lse.transpose(1, 2), sinks)
        o, lse = beside.to(q.dtype), total.transpose(1, 2)
    return AttentionOutput(o, lse)


@torch.no_grad()
def read_latents(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    state: LayerKeys,
    layout: ShardedLayout,
    w_uk: Tensor,
    w_uv: Tensor,
) -> AttentionOutput:
    """`read_attention` to latents (`ring_la.mla`): of the new tokens as `mla`, and of those before them absorbed.

    Args:
        q: ``[B, T_local, H, D + R]``. latent: ``[B, T_local, L]``. k_rope: ``[B, T_local, R]``; they are put into
            `state`, of KeySize(1, L + R, 0). w_uk: ``[H, D, L]``. w_uv: ``[H, V, L]``.
        layout: as `read_attention`.

    Returns:
        AttentionOutput(o ``[B, T_local, H, V]``, lse ``[B, H, T_local]``).
    """
    state.put(torch.cat([latent, k_rope], -1)[:, :, None])
    new = mla(q, latent, k_rope, w_uk, w_uv, layout=layout)
    return with_earlier_latents(q, AttentionOutput(*new[:2]), state, layout, w_uk, w_uv, scale=q.shape[3] ** -0.5)


@torch.no_grad()
def with_earlier_latents(
    q: Tensor,
    new: AttentionOutput,
    state: LayerKeys,
    layout: ShardedLayout,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    """`with_earlier` of latents, absorbed; `state` has keys ``[c ; r]``. w_uk, w_uv: as `read_latents`.
    scale: multiplies ``qᵀk``."""
    if not any(state.rows.earlier):
        return new
    D, L = w_uk.shape[1:]
    low = torch.cat([torch.einsum("bthd,hdl->bthl", q[..., :D], w_uk), q[..., D:]], -1)
    out = Partial(tuple(new.o.shape), q.dtype, q.device)
    out.add(new.o, new.lse)
    for part in _parts(low, state, layout, EarlierScores(scale)):
        raised = torch.einsum("bthl,hvl->bthv", part[..., :L], w_uv.to(part.dtype))
        out.add(raised, part[..., -1].transpose(1, 2))
    return AttentionOutput(*out.result())


class EarlierScores(NamedTuple):
    """How a query's scores with earlier keys are made."""

    scale: float
    window: int = -1
    """Earlier tokens it sees; −1: all."""
    softcap: float = 0.0
    """c > 0 caps them at ±c."""


def _parts(q: Tensor, state: LayerKeys, layout: ShardedLayout, how: EarlierScores) -> Iterator[Tensor]:
    """What each rank's earlier keys give this rank's queries, in turn: ``[B, T, H, V + 1]`` wide, lse last."""
    comm = layout.cp.comm
    for s in range(comm.size):
        to, source = (comm.rank + s) % comm.size, (comm.rank - s) % comm.size
        theirs = q if s == 0 else q.new_empty(q.shape[0], layout.lengths[source], *q.shape[2:])
        if s:
            _swap(comm, {to: q}, {source: theirs})
        part = _earlier(theirs, state, layout.positions_of(layout.tokens(source)), how)
        if s:
            back = part.new_empty(*q.shape[:3], part.shape[3])
            _swap(comm, {source: part}, {to: back})
            part = back
        yield part


def _swap(comm: Group, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
    """Send and receive what is not empty: a rank may have no token of a short piece."""
    sends, receives = ({r: x for r, x in side.items() if x.numel()} for side in (sends, receives))
    if sends or receives:
        comm.exchange(sends, receives).wait()


def _earlier(q: Tensor, state: LayerKeys, positions: Tensor, how: EarlierScores) -> Tensor:
    """What this rank's earlier keys give queries at `positions` after them: ``[B, T, H, V + 1]`` wide, lse last."""
    B, T, H, _ = q.shape
    dtype = wide(q.dtype)
    V = state.size.value or state.size.key
    out = torch.zeros(B, T, H, V + 1, dtype=dtype, device=q.device)
    out[..., -1] = -torch.inf
    for b, (held, length, here) in enumerate(zip(state.rows.held, state.rows.earlier, state.rows.here)):
        at = positions + length
        some: slice | Tensor
        if how.window < 0:
            some, part = slice(0, T), Partial((1, T, H, V), q.dtype, q.device)
            for span in held.spans(0, here) if T else ():
                k, v = (x.to(q.dtype)[None] for x in state.views(span))
                part.add(*attention(q[b : b + 1], k, v, causal=False, scale=how.scale, softcap=how.softcap))
        else:
            near = (at - how.window < length).nonzero().flatten()
            some = near.to(q.device)
            part = _in_window(q[b, some], state, held, here, at[near], how)
        if not part.empty:
            o, lse = part.result()
            out[b, some] = torch.cat([o[0].to(dtype), lse[0].mT[..., None]], -1)
    return out


def _in_window(q: Tensor, state: LayerKeys, held: Held, here: int, at: Tensor, how: EarlierScores) -> Partial:
    """What queries ``[T, H, K]`` at positions `at` get from earlier keys that are in their window."""
    heads, _, value = state.size
    part = Partial((1, len(q), q.shape[1], value), q.dtype, q.device)
    if not len(q):
        return part
    first = held.before(int(at.min()) - how.window)
    spans = held.spans(min(first, here), here)
    if not spans:
        return part
    k, v = (torch.cat(x).to(wide(q.dtype)) for x in zip(*map(state.views, spans)))
    places = torch.tensor([p for run in held.runs for p in run][first:here], device="cpu")
    for a in range(0, len(q), QUERIES):
        rows = q[a : a + QUERIES].unflatten(1, (heads, -1)).to(k.dtype)
        scores = torch.einsum("thgk,nhk->hgtn", rows, k) * how.scale
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        seen = places >= at[a : a + QUERIES, None] - how.window
        scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
        lse = scores.logsumexp(-1)
        safe = torch.where(torch.isneginf(lse), 0.0, lse)
        o = torch.einsum("hgtn,nhv->thgv", torch.exp(scores - safe[..., None]), v).flatten(1, 2)
        part.add(o[None].to(q.dtype), lse.flatten(0, 1)[None], slice(a, a + len(rows)))
    return part
