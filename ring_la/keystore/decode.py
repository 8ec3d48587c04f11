"""One token of each sequence over the keys of all ranks.

Each rank computes what its own keys give, ``o_r`` and ``lse_r`` of every head; one all-gather of ``[N, H, V + 1]``
brings all ranks' results, and every rank merges them in the same order:

    lse = log Σ_r exp lse_r,     o = Σ_r exp(lse_r − lse) o_r

so all ranks have the same numbers, bit for bit. A rank without a key of a sequence brings lse = −∞.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_int, check_kind
from ..errors import ArgumentError, describe_tensor
from ..outputs import AttentionOutput
from ..softmax import attention
from ..softmax.merging import wide
from ..softmax.products import product
from .chosen import own_chosen
from .columns import Columns, by_products
from .pages import SlabTokens
from .plan import SlabBlocks
from .store import LayerKeys


@torch.no_grad()
def decode_attention(
    q: Tensor,
    state: LayerKeys,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = -1,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    block: int = 1,
) -> AttentionOutput:
    """Softmax attention of one token of each sequence to its keys on all ranks. Collective, without gradients.

    Args:
        q: ``[N, 1, H, K]``, the last token of each sequence of `state`, the same on all ranks; with a choice also the
            last T, ``[N, T, H, K]``. state: keys and values; these tokens' are among them.
        scale: multiplies ``qᵀk``; None: K**-0.5. softcap: c > 0 caps scores at ±c; 0: none.
        window: earlier tokens a token sees; −1: all. sinks: ``[H]``, one more logit in each head's denominator.
        chosen: positions in its sequence of the keys that a token reads, each of the first of `block` keys; −1: none.
            Int ``[N, T, heads or 1, S]``, the same on all ranks, as `decode_index` gives them; no window and no softcap
            then. None: it sees all.

    Returns:
        AttentionOutput(o ``[N, T, H, V]`` in q's dtype, lse fp32 (fp64 for fp64) ``[N, H, T]``). One message:
        ``N · T · H · (V + 1)`` numbers in the dtype of lse to each other rank, whatever the sequences' lengths.

    Raises:
        ArgumentError: by name.
    """
    _check_query(q, state, one=chosen is None)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if chosen is None:
        o, lse = _own(q[:, 0], state, factor, softcap, window)
    else:
        _check_choice(chosen, q.shape[1], block, state, softcap, window)
        o, lse = own_chosen(q.flatten(0, 1), state, chosen.flatten(0, 1), block, factor)
    comm = None if state.rows.store.cp is None else state.rows.store.cp.comm
    if comm is not None and comm.size > 1:
        o, lse = merged(comm.all_gather(torch.cat([o, lse[..., None]], -1)).wait(), 0)
    o, lse = (o, lse) if sinks is None else beside_sinks(o, lse, sinks)
    return AttentionOutput(o.unflatten(0, q.shape[:2]).to(q.dtype), lse.unflatten(0, q.shape[:2]).transpose(1, 2))


@torch.no_grad()
def decode_latents(
    q: Tensor,
    state: LayerKeys,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    chosen: Tensor | None = None,
    block: int = 1,
) -> AttentionOutput:
    """`decode_attention` to latents (`ring_la.mla`, absorbed): every head reads one key ``[c_j ; r_j]``. Collective.

    Args:
        q: ``[N, 1, H, D + R]``, with a choice ``[N, T, H, D + R]``, in each head first what meets W_uk.
        state: latents, of KeySize(1, L + R, 0).
        w_uk: ``[H, D, L]``. w_uv: ``[H, V, L]``. scale: None: (D + R)**-0.5. softcap, chosen, block: as in
            `decode_attention`.

    Returns:
        AttentionOutput(o ``[N, T, H, V]``, lse ``[N, H, T]``). ``N · T · H · (L + R + 1)`` numbers to each other rank.

    Raises:
        ArgumentError: by name.
    """
    check_kind("state", state, LayerKeys)
    if state.size.heads != 1 or state.size.value:
        raise ArgumentError("state", "latents: KeySize(1, L + R, 0)", state.size)
    D, L = w_uk.shape[1:]
    low = torch.cat([torch.einsum("bthd,hdl->bthl", q[..., :D], w_uk), q[..., D:]], -1)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    o, lse = decode_attention(low, state, scale=factor, softcap=softcap, chosen=chosen, block=block)
    return AttentionOutput(torch.einsum("bthl,hvl->bthv", o[..., :L], w_uv), lse)


def _check_query(q: object, state: LayerKeys, one: bool) -> None:
    check_kind("state", state, LayerKeys)
    (heads, key, _), N = state.size, len(state.rows)
    if not isinstance(q, Tensor) or q.dim() != 4 or len(q) != N or (one and q.shape[1] != 1) or q.shape[2] % heads:
        raise ArgumentError("q", f"[{N}, {1 if one else 'T'}, a multiple of {heads}, {key}]", describe_tensor(q))
    if q.shape[3] != key:
        raise ArgumentError("q", f"{key} channels, as the keys have", q.shape[3])


def _check_choice(chosen: object, T: int, block: object, state: LayerKeys, softcap: float, window: int) -> None:
    heads = state.size.heads
    fits = isinstance(chosen, Tensor) and chosen.dim() == 4 and chosen.shape[:2] == (len(state.rows), T)
    if not fits or not isinstance(chosen, Tensor) or chosen.shape[2] not in (1, heads) or chosen.is_floating_point():
        raise ArgumentError("chosen", f"int [{len(state.rows)}, {T}, {heads} or 1, S]", describe_tensor(chosen))
    check_int("block", block, 1)
    for name, given, none in (("softcap", softcap, 0.0), ("window", window, -1)):
        if given != none:
            raise ArgumentError(name, f"{none} where keys are chosen", given)


def beside_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``o [..., H, V]`` and ``lse [..., H]`` with one more logit of each head in the denominator."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return o * torch.exp(lse - total)[..., None], total


def _own(q: Tensor, state: LayerKeys, scale: float, softcap: float, window: int) -> tuple[Tensor, Tensor]:
    """What this rank's keys give: o ``[N, H, V]`` and lse ``[N, H]``, wide."""
    plan, (heads, key, value) = state.rows.plan(window), state.size
    dtype, V = wide(q.dtype), value or key
    parts = []
    for row, span in plan.alone:
        if state.part == "joined":
            parts.append(_latents_alone(q[row : row + 1], state, span, scale, softcap).to(dtype))
            continue
        k, v = (x.to(q.dtype)[None] for x in state.views(span))
        rows = q[row].view(heads, -1, key).transpose(0, 1)[None]  # heads that share keys are queries of one
        o, lse = attention(rows, k, v, causal=False, scale=scale, softcap=softcap)
        one = torch.cat([o.to(dtype), lse.to(dtype).mT[..., None]], -1)  # [1, H // heads, heads, V + 1]
        parts.append(one.transpose(1, 2).flatten(1, 2))
    parts += [_together(q, state, blocks, scale, softcap) for blocks in plan.together]
    nothing = torch.zeros(1, q.shape[1], V + 1, dtype=dtype, device=q.device)
    nothing[..., -1] = -torch.inf
    if not parts:
        return nothing[..., :-1].expand(len(q), -1, -1), nothing[..., -1].expand(len(q), -1)
    return merged(torch.cat([*parts, nothing])[plan.table], 1)


def _latents_alone(q: Tensor, state: LayerKeys, span: SlabTokens, scale: float, softcap: float) -> Tensor:
    """What latents side by side, and their rotary keys, give one token ``q [1, H, L + R]``, where they are:
    ``[1, H, L + 1]``, lse last."""
    low, turned = (x[span.start : span.stop].transpose(0, 1)[None].to(q.dtype) for x in state.memory(span.slab))
    first = torch.zeros(1, dtype=torch.int64, device=q.device)
    meets, rest = q.split([low.shape[3], turned.shape[3]], -1)
    read = Columns(low, None, first, first + low.shape[2], rest, turned)
    o, lse = by_products(meets, read, scale, softcap)
    return torch.cat([o, lse[..., None]], -1)


def _together(q: Tensor, state: LayerKeys, blocks: SlabBlocks, scale: float, softcap: float) -> Tensor:
    """What some blocks give, each its row: ``[M, H, V + 1]``, lse last."""
    heads, n = state.size.heads, state.rows.store.pages.block
    seen = blocks.seen.repeat_interleave(heads, 0)[:, None]  # [M heads, 1, n]

    def read(memory: Tensor) -> Tensor:  # as it is stored, a head's keys in one matrix: [M heads, n, ·]
        x = memory.unflatten(0, (-1, n)).transpose(1, 2).index_select(0, blocks.block).flatten(0, 1)
        x.masked_fill_(~seen.mT, 0)  # what is left of others may be no number
        return x.double() if q.dtype == torch.float64 else x

    k, v = state.read(*map(read, state.memory(blocks.slab)))
    scores = product(q[blocks.row].unflatten(1, (heads, -1)).flatten(0, 1), k.mT) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    o = product(torch.exp(scores - lse), v)
    return torch.cat([o, lse], -1).unflatten(0, (-1, heads)).flatten(1, 2)


def merged(parts: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Results ``[…, H, V + 1]`` over disjoint keys, lse last, put together along `dim`."""
    o, lse = parts[..., :-1], parts[..., -1]
    total = torch.logsumexp(lse, dim)
    safe = torch.where(torch.isneginf(total), 0.0, total)
    weight = torch.exp(lse - safe.unsqueeze(dim))
    return (o * weight[..., None]).sum(dim), total
