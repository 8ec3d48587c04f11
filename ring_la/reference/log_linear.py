"""Log-linear attention as its definition has it: every token over the levels of a Fenwick tree, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_la.errors import ArgumentError
from ring_la.outputs import LinearAttentionOutput
from ring_la.reference.arguments import documents, expect_local, expect_shape


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lam: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    first: int | tuple[int, ...] = 0,
    output_final_state: bool = False,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: str | None = None,
) -> LinearAttentionOutput:
    """A state a level, which tokens decay, merge and read one after the other (Guo et al. 2025, arXiv 2506.04761)."""
    expect_local(layout, backend)
    B, T, H, L = lam.shape
    expect_shape("g", g, B=B, T=T, H=H)
    rows = documents(B, T, cu_seqlens)
    N, K, V = rows[-1].states.stop, q.shape[3], v.shape[3]
    before = v.new_zeros(N, H, L, K, V) if initial_state is None else initial_state
    expect_shape("initial_state", before, N=N, H=H, L=L, K=K, V=V)
    seen = first if isinstance(first, tuple) else (first,) * N
    if len(seen) != N or (cu_seqlens is None and len(set(seen)) > 1) or (initial_state is None and any(seen)):
        raise ArgumentError("first", f"an int, or {N} of them, 0 without an initial_state", repr(first))
    factor = K**-0.5 if scale is None else scale
    q, k = (x.double().repeat_interleave(H // x.shape[2], 2) for x in (q, k))
    outputs, after = [v.new_zeros(B, 0, H, V, dtype=torch.float64)], []
    for d, start in zip(rows, seen):
        tokens = [x[d.rows, d.tokens].double() for x in (q, k, v, g, lam)]
        o, S = _document(tokens, before[d.states].double(), start, factor)
        outputs.append(o)
        after.append(S)
    return LinearAttentionOutput(torch.cat(outputs, 1), torch.cat(after) if output_final_state else None)


def _document(tokens: Sequence[Tensor], before: Tensor, start: int, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, H, V]`` of a document of which `start` tokens were seen, and its levels 1 … L after it."""
    outputs, L = [tokens[2][:, :0]], before.shape[2]
    if not tokens[0].shape[1]:
        return outputs[0], before
    S = [torch.zeros_like(before[:, :, 0]), *before.unbind(2)]  # the token itself, then blocks of 1, 2, 4 …
    S = [x if i and start >> (i - 1) & 1 else torch.zeros_like(x) for i, x in enumerate(S)]
    for t, (q, k, v, g, weights) in enumerate(zip(*(x.unbind(1) for x in tokens)), start):
        S = [g.exp()[..., None, None] * level for level in (S if t == start else _merged(S, t))]
        S[0] = k[..., None] * v[..., None, :]
        total = sum(weights[..., i, None, None] * S[i] for i in range(min(L, t.bit_length() + 1)))
        outputs.append((scale * q[..., None] * total).sum(-2)[:, None])
    return torch.cat(outputs, 1), torch.stack(_merged(S, start + tokens[0].shape[1])[1:], 2)


def _merged(S: Sequence[Tensor], t: int) -> list[Tensor]:
    """The levels before the token at t > 0: those up to the lowest bit of t are one, the next above that bit."""
    bit = (t & -t).bit_length()
    return [*(torch.zeros_like(x) for x in S[:bit]), torch.stack(list(S[:bit])).sum(0), *S[bit + 1 :]]
