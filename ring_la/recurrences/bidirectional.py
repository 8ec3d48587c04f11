"""Linear attention without a direction: every token reads its document's whole state, as diffusion models do.

    S_doc = Σ_t k_t v_tᵀ,        o_t = scale · S_docᵀ q_t,        or that over scale · (Σ k')ᵀ q'_t + eps

Tokens add up to documents on each rank, documents over ranks by one all-reduce; no order, so no scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import full_precision
from ..comm import Replicated, SumOverRanks
from ..context import ShardedLayout
from ..kernels import Inputs, state_dtype
from ..kernels.fused.bidirectional import outer_sum, read_quotient, read_state, sum_and_read
from ..outputs import LinearAttentionOutput
from .definition import CommonOptions, Normalizer


def bidirectional(
    inputs: Inputs, scale: float, options: CommonOptions, normalizer: Normalizer | None = None
) -> LinearAttentionOutput:
    """o ``[B, T, H, V]`` and each document's state ``[N, H, K, V]``, of q, k ``[B,T,Hk,K]`` and v ``[B,T,H,V]``.

    An initial state ``[N, H, K, V]`` is added to every document's sum. With a `normalizer` the state has one column
    more, Σ k'.
    """
    initial = options.initial_state
    with full_precision(inputs.q):
        if options.layout is not None:
            o, S = _split(inputs, scale, initial, options.layout, normalizer)
        elif normalizer is None:
            o, S = _local(inputs, scale, initial, options.cu_seqlens)
        else:
            o, S = _normalized(inputs, scale, initial, options.cu_seqlens, normalizer)
    return LinearAttentionOutput(o.to(inputs.v.dtype), S if options.output_final_state else None)


def _local(inputs: Inputs, scale: float, initial: Tensor | None, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    """One device: o, and each document's state."""
    q, k, v = inputs.qkv
    if initial is not None:
        initial = (initial[:, None] if cu is None else initial[None]).to(state_dtype(k, v))
    o, S = sum_and_read(q, k, v, initial, cu, scale)
    return o, S[:, 0] if cu is None else S[0]


def _normalized(
    inputs: Inputs, scale: float, initial: Tensor | None, cu: Tensor | None, normalizer: Normalizer
) -> tuple[Tensor, Tensor]:
    """One device, with a denominator."""
    S = _sums(inputs, cu, normalizer)
    if initial is not None:
        S = S + (initial[:, None] if cu is None else initial[None]).to(S.dtype)
    return _read(inputs, S, cu, scale, normalizer), S[:, 0] if cu is None else S[0]


def _sums(inputs: Inputs, cu: Tensor | None, normalizer: Normalizer | None) -> Tensor:
    """What this rank's tokens add to each of its pieces, ``[B, N, H, K, V]``, or with Σ k' as one more column."""
    k, v = inputs.k, inputs.v
    S = outer_sum(k, v, cu)
    if normalizer is None:
        return S
    return torch.cat([S, _key_sums(normalizer.k, v.shape[2], cu).to(S.dtype)], -1)


def _key_sums(k: Tensor, heads: int, cu: Tensor | None) -> Tensor:
    """Σ k of each piece, ``[B, N, H, K, 1]``, in fp32 or wider."""
    if cu is not None:
        return outer_sum(k, k.new_ones(*k.shape[:2], heads, 1), cu)
    total = k.sum(1, dtype=torch.promote_types(k.dtype, torch.float32))
    return total.repeat_interleave(heads // k.shape[2], 1)[:, None, ..., None]


def _read(inputs: Inputs, S: Tensor, cu: Tensor | None, scale: float, normalizer: Normalizer | None) -> Tensor:
    """What this rank's tokens read."""
    if normalizer is None:
        return read_state(inputs.q, S, cu, scale)
    own = None if normalizer.q is inputs.q else normalizer.q.to(inputs.q.dtype)
    return read_quotient(inputs.q, own, S, cu, scale, normalizer.eps)


def _split(
    inputs: Inputs, scale: float, initial: Tensor | None, layout: ShardedLayout, normalizer: Normalizer | None
) -> tuple[Tensor, Tensor]:
    """The same of this rank's tokens: pieces add up to documents, and documents over ranks."""
    if not layout.packed:  # a batch row is a document
        S = SumOverRanks.apply(_sums(inputs, None, normalizer), layout.cp.comm)
        if initial is not None:
            S = S + Replicated.apply(initial, layout.cp.comm)[:, None].to(S.dtype)
        return _read(inputs, S, None, scale, normalizer), S[:, 0]
    cu = layout.cu_pieces.to(inputs.q.device) if len(layout.pieces) > 1 else None
    documents = layout.kept(_of_pieces, lambda: _of_pieces(layout, inputs.q.device))
    own = _sums(inputs, cu, normalizer)[:, : len(documents)]
    S = own.new_zeros(1, layout.num_documents, *own.shape[2:]).index_add(1, documents, own)
    S = SumOverRanks.apply(S, layout.cp.comm)
    if initial is not None:
        S = S + Replicated.apply(initial, layout.cp.comm)[None].to(S.dtype)
    entering = S.index_select(1, documents) if len(documents) else S[:, :1]
    return _read(inputs, entering, cu, scale, normalizer), S[0]


def _of_pieces(layout: ShardedLayout, device: torch.device) -> Tensor:
    """The document of each of this rank's pieces."""
    return torch.tensor([p.document for p in layout.pieces], dtype=torch.int64, device=device)
