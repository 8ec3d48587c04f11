"""ring-flash-attn's entry points over ring_la, with its signatures (those of yunchang without softcap and attn_type).

    from ring_la.integrations.ring_flash_attn import zigzag_ring_flash_attn_func

The llama3 functions gather keys and values of packed documents that are split in place: their `cu_seqlens` come from
`llama3_flash_attn_prepare_cu_seqlens`. `heads_k_stride` limits upstream's buffers; here all heads are gathered at once.
`ring_la.integrations.transformers` stands in place of upstream's adapter, which swaps a function of that library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_flag
from ..errors import ArgumentError, describe_tensor
from ..layout import check_cu_seqlens
from ..softmax.geometry import Run, Tokens
from ..softmax.merging import wide
from ..softmax.plan import AttentionMoves, Saved
from ..softmax.strategies import KeyGather
from ..softmax.tensors import Tensors
from . import yunchang
from .yunchang.call import Masks, UpstreamCall, checked, group_of, settled
from .yunchang.ctx import others, recall, remember
from .yunchang.entries import packing
from .yunchang.layers import check_rank
from .yunchang.packed import check_longest

YUNCHANGS_OWN = {"softcap", "attn_type", "attn_processor"}
"""Arguments of yunchang's entry points that ring-flash-attn's do not have."""


def _without(entry: Callable, dim: int) -> tuple[Callable, Callable, Callable]:
    """The plain, kvpacked and qkvpacked entry points of a plain one of yunchang's, without what is its own; tensors are
    stacked along `dim`."""
    theirs = inspect.signature(entry)
    own = theirs.replace(parameters=[p for name, p in theirs.parameters.items() if name not in YUNCHANGS_OWN])

    def plain(*args: Any, **keywords: Any) -> Any:
        try:
            given = own.bind(*args, **keywords)
        except TypeError as error:
            raise TypeError(f"{plain.__name__}() {error}") from None
        return entry(**given.arguments)

    plain.__signature__ = own  # type: ignore[attr-defined]
    return packing(entry.__name__.removesuffix("_func"), plain, dim, "ring-flash-attn")


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _without(
    yunchang.ring_flash_attn_func, 2
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _without(
    yunchang.zigzag_ring_flash_attn_func, 2
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _without(
    yunchang.stripe_flash_attn_func, 2
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _without(
    yunchang.ring_flash_attn_varlen_func, 1
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _without(yunchang.zigzag_ring_flash_attn_varlen_func, 1)


# -- llama3 ------------------------------------------------------------------------------------------------


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What one rank's call needs to know of documents packed into a sequence that is split in place.

    Returns (offsets of this rank's queries, offsets of the keys they see, longest of each, these keys in the sequence).
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or not len(cu_seqlens) or not cu_seqlens[-1]:
        raise ArgumentError("cu_seqlens", "an integer tensor [N+1] of at least one token", describe_tensor(cu_seqlens))
    cu = check_cu_seqlens(cu_seqlens, int(cu_seqlens[-1]))
    check_flag("causal", causal)
    check_rank(rank, world_size)
    if cu[-1] % world_size:
        raise ArgumentError("cu_seqlens", f"a total length that is a multiple of {world_size}", cu[-1])
    length = cu[-1] // world_size
    start, stop = rank * length, (rank + 1) * length
    mine = [(a, b) for a, b in zip(cu, cu[1:]) if a < stop and b > start]
    q = [0] + [min(b, stop) - start for _, b in mine]
    first, last = mine[0][0], stop if causal else mine[-1][1]
    k = [0] + [min(b, last) - first for _, b in mine]
    longest = (max(b - a for a, b in zip(x, x[1:])) for x in (q, k))
    offsets = (torch.tensor(x, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for x in (q, k))
    return (*offsets, *longest, slice(first, last))  # type: ignore[return-value]


def _check_documents(cu_q: Any, cu_k: Any, part: Any, length: int, total: int) -> None:
    """Refuse offsets that are not those of this rank's `length` queries, or of the keys `part` of the `total`."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(cu, Tensor):
            raise ArgumentError(name, "an integer tensor [N+1]", describe_tensor(cu))
    documents = check_cu_seqlens(cu_q, length, "cu_seqlens_q")
    plain = isinstance(part, slice) and part.step in (None, 1)
    ends: tuple[Any, Any] = (part.start, part.stop) if plain else (None, None)
    if not all(hasattr(n, "__index__") for n in ends) or not 0 <= ends[0] <= ends[1] <= total:
        raise ArgumentError("local_k_slice", f"a slice from 0 or more to {total} or less", part)
    if len(check_cu_seqlens(cu_k, part.stop - part.start, "cu_seqlens_k")) != len(documents):
        raise ArgumentError("cu_seqlens_k", f"{len(documents)} offsets, as many as cu_seqlens_q", len(cu_k))


class Llama3FlashAttnVarlenFunc(torch.autograd.Function):
    """All keys gathered, packed documents split in place."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        heads_k_stride: int,
        local_k_slice: slice,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        group: dist.ProcessGroup | None,
    ) -> Any:
        masks = Masks(dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic)

        def make() -> UpstreamCall:
            call = checked("contiguous", Tensors(q[None], k[None], v[None]), masks, None, return_softmax)
            if not isinstance(heads_k_stride, int) or heads_k_stride < 1 or k.shape[1] % heads_k_stride:
                raise ArgumentError("heads_k_stride", f"a divisor of the {k.shape[1]} key heads", heads_k_stride)
            total = group_of(group).size * len(k)
            _check_documents(cu_seqlens_q, cu_seqlens_k, local_k_slice, len(q), total)
            check_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q.tolist())
            check_longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k.tolist())
            return call

        call = settled([group_of(group)], (q, k, v), make, packed=True)
        x = Tensors(*(t.contiguous()[None] for t in (q, k, v)))
        plan = _plan(call, x, group, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), local_k_slice)
        out, lse, _ = plan.forward(x)
        ctx.save_for_backward(q, x.k[0], x.v[0], out[0], lse[0], cu_seqlens_q, cu_seqlens_k)
        ctx.max_seqlen_q, ctx.max_seqlen_k = max_seqlen_q, max_seqlen_k
        ctx.heads_k_stride, ctx.local_k_slice = heads_k_stride, local_k_slice
        remember(ctx, call, group, None, None)
        return (out[0], lse[0], None) if return_softmax else out[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *args: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        call, x = recall(ctx, "contiguous"), Tensors(q[None], k[None], v[None])
        dlse = args[0][None] if args and args[0] is not None else None
        plan = _plan(call, x, ctx.group, cu_q.tolist(), cu_k.tolist(), ctx.local_k_slice)
        saved = Saved(x, out[None], lse[None].to(wide(q.dtype)))
        grads = plan.backward(saved, None if dout is None else dout[None], dlse)
        return grads.q[0], grads.k[0], grads.v[0], *others(ctx)


def _plan(
    call: UpstreamCall,
    x: Tensors,
    group: dist.ProcessGroup | None,
    cu_q: list[int],
    cu_k: list[int],
    keys: slice,
) -> AttentionMoves:
    """All-gather of keys, of which this rank's queries see documents at `cu_k` of the slice `keys` alone."""
    ring = group_of(group)
    size, length, device = ring.size, x.k.shape[1], x.q.device
    plan = call.plan(x, ring)
    documents = list(enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:])))
    rows = []
    for n, (a, b, c, d) in documents:
        start = (d - c) - (b - a) if call.masks.causal else ring.rank * length + a - keys.start - c
        rows += [Run(a, b - a, ring.rank * length + a, start, n)] if b > a else []
    places = [(keys.start + c, keys.start + d, 0, n) for n, (_, _, c, d) in documents]
    unseen = ((0, keys.start, 0, -2), (places[-1][1], size * length, 0, -2))
    seen = [Run(c, d - c, c, p, n) for c, d, p, n in (unseen[0], *places, unseen[1]) if d > c]
    all_rows = [plan.job.rows[r] for r in range(size)]
    all_rows[ring.rank] = Tokens(rows, x.q.shape[1], device)
    job = replace(plan.job, rows=tuple(all_rows), all_keys=Tokens(seen, size * length, device))
    return replace(plan, job=job, strategy=KeyGather())


def _llama3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice)
    masks = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    return Llama3FlashAttnVarlenFunc.apply(q, k, v, *lengths, *masks, return_attn_probs, group)


(
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = packing("llama3_flash_attn_varlen", _llama3, 1, "ring-flash-attn")
