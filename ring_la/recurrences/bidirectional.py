"""Linear attention without a direction: every token reads its document's whole state, as diffusion models do.

    S_doc = Σ_t k_t v_tᵀ,        o_t = scale · S_docᵀ q_t

Tokens add up to documents on each rank, documents over ranks by one all-reduce; no order, so no scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import full_precision
from ..comm import Replicated, SumOverRanks
from ..context import ShardedLayout
from ..kernels import Inputs, state_dtype
from ..kernels.fused.bidirectional import outer_sum, read_state, sum_and_read
from ..outputs import LinearAttentionOutput
from .definition import CommonOptions


def bidirectional(inputs: Inputs, scale: float, options: CommonOptions) -> LinearAttentionOutput:
    """o ``[B, T, H, V]`` and each document's state ``[N, H, K, V]``, of q, k ``[B,T,Hk,K]`` and v ``[B,T,H,V]``.

    An initial state ``[N, H, K, V]`` is added to every document's sum.
    """
    initial = options.initial_state
    with full_precision(inputs.q):
        if options.layout is None:
            o, S = _local(inputs, scale, initial, options.cu_seqlens)
        else:
            o, S = _split(inputs, scale, initial, options.layout)
    return LinearAttentionOutput(o.to(inputs.v.dtype), S if options.output_final_state else None)


def _local(inputs: Inputs, scale: float, initial: Tensor | None, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    """One device: o, and each document's state."""
    q, k, v = inputs[:3]
    if initial is not None:
        initial = (initial[:, None] if cu is None else initial[None]).to(state_dtype(k, v))
    o, S = sum_and_read(q, k, v, initial, cu, scale)
    return o, S[:, 0] if cu is None else S[0]


def _split(inputs: Inputs, scale: float, initial: Tensor | None, layout: ShardedLayout) -> tuple[Tensor, Tensor]:
    """The same of this rank's tokens: pieces add up to documents, and documents over ranks."""
    q, k, v = inputs[:3]
    if not layout.packed:  # a batch row is a document
        S = SumOverRanks.apply(outer_sum(k, v, None), layout.cp.comm)
        if initial is not None:
            S = S + Replicated.apply(initial, layout.cp.comm)[:, None].to(S.dtype)
        return read_state(q, S, None, scale), S[:, 0]
    cu = layout.cu_pieces.to(q.device) if len(layout.pieces) > 1 else None
    numbers = [p.document for p in layout.pieces]
    documents = layout.kept("documents", lambda: torch.tensor(numbers, dtype=torch.int64, device=q.device))
    own = outer_sum(k, v, cu)[:, : len(numbers)]
    S = own.new_zeros(1, layout.num_documents, *own.shape[2:]).index_add(1, documents, own)
    S = SumOverRanks.apply(S, layout.cp.comm)
    if initial is not None:
        S = S + Replicated.apply(initial, layout.cp.comm)[None].to(S.dtype)
    entering = S.index_select(1, documents) if numbers else S[:, :1]
    return read_state(q, entering, cu, scale), S[0]
