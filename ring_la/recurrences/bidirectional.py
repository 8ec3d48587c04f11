"""Linear attention without a direction: every token reads its document's whole state, as diffusion models do.

    S_doc = Σ_t k_t v_tᵀ,        o_t = scale · S_docᵀ q_t

Tokens add up to documents on each rank, documents over ranks by one all-reduce; no order, so no scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Replicated, SumOverRanks
from ..context import ShardedLayout
from ..kernels import Chunks, Inputs, state_dtype
from ..kernels.outer import outer_sum
from ..outputs import LinearAttentionOutput

CHUNK = 64


def bidirectional(
    inputs: Inputs,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    layout: ShardedLayout | None,
    cu_seqlens: Tensor | None,
) -> LinearAttentionOutput:
    """o ``[B, T, H, V]`` and each document's state ``[N, H, K, V]``, of q, k ``[B,T,Hk,K]`` and v ``[B,T,H,V]``.

    An initial state ``[N, H, K, V]`` is added to every document's sum.
    """
    packed = cu_seqlens is not None if layout is None else layout.packed
    run = _packed if packed else _rows
    with torch.autocast(inputs.q.device.type, enabled=False):
        o, S = run(inputs, scale, initial_state, layout, cu_seqlens)
    return LinearAttentionOutput(o.to(inputs.v.dtype), S if output_final_state else None)


def _rows(
    inputs: Inputs, scale: float, initial: Tensor | None, layout: ShardedLayout | None, cu_seqlens: None
) -> tuple[Tensor, Tensor]:
    """Every batch row one document, on any number of ranks: two products."""
    q, k, v = inputs[:3]
    repeat = v.shape[2] // q.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, T, ·]
    if repeat > 1:
        q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    S = outer_sum(k, v)
    if layout is not None:
        S = SumOverRanks.apply(S, layout.cp.comm)
    if initial is not None:
        S = S + (initial if layout is None else Replicated.apply(initial, layout.cp.comm)).to(S.dtype)
    return (q @ (scale * S).to(q.dtype)).transpose(1, 2), S


def _packed(
    inputs: Inputs, scale: float, initial: Tensor | None, layout: ShardedLayout | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Documents packed into one row: chunks, none of which two documents share, added up."""
    q, k, v = inputs[:3]
    dtype, heads = state_dtype(q, k, v), v.shape[2]
    if layout is None:
        documents = cu_seqlens.shape[0] - 1
    else:
        documents = layout.num_documents
        cu_seqlens = layout.cu_pieces.to(q.device) if len(layout.pieces) > 1 else None
    chunks = Chunks(q.shape[1], CHUNK, cu_seqlens, device=q.device)
    q, k, v = (chunks.split(x.to(dtype)) for x in (q, k, v))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    document = _document_of_chunk(chunks, layout, q.device)
    parts = k.mT @ v  # [1, chunks, H, K, V]
    S = parts.new_zeros(1, documents + 1, *parts.shape[2:]).index_add(1, document, parts)
    S = S[:, :documents]  # the last row took the unused chunks
    if layout is not None:
        S = SumOverRanks.apply(S, layout.cp.comm)
    if initial is not None:
        S = S + (initial if layout is None else Replicated.apply(initial, layout.cp.comm))[None].to(dtype)
    o = chunks.merge(scale * (q @ S.index_select(1, document.clamp(max=documents - 1))))
    return o, S[0]


def _document_of_chunk(chunks: Chunks, layout: ShardedLayout | None, device: torch.device) -> Tensor:
    """The document each chunk belongs to, int64; one past the last for chunks without tokens."""
    if layout is None or not layout.pieces:
        return chunks.piece if chunks.packed else torch.zeros(chunks.count, dtype=torch.int64, device=device)
    of_piece = torch.tensor([*(p.document for p in layout.pieces), layout.num_documents], device=device)
    return of_piece[chunks.piece] if chunks.packed else of_piece[:1].expand(chunks.count)
