"""Log-linear attention as its definition has it: every token over the levels of a Fenwick tree, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: str | None = None,
) -> LinearAttentionOutput:
    """A state a level, which tokens decay, merge and read one after the other (Guo et al. 2025, arXiv 2506.04761)."""
    expect_local(layout, backend)
    B, T, H, L = lam.shape
    expect_shape("g", g, B=B, T=T, H=H)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k = (x.double().repeat_interleave(H // x.shape[2], 2) for x in (q, k))
    outputs = []
    for d in documents(B, T, cu_seqlens):
        rows = [x[d.rows, d.tokens].double() for x in (q, k, v, g, lam)]
        S: list[Tensor | float] = [0.0] * L
        for t, (qt, kt, vt, gt, weights) in enumerate(zip(*(x.unbind(1) for x in rows))):
            S = [gt.exp()[..., None, None] * level for level in S]
            if t:  # levels up to the lowest bit of t become one, the next above that bit
                merged = (t & -t).bit_length()
                S[merged] = sum(S[:merged])
                S[:merged] = [0.0] * merged
            S[0] = kt[..., None] * vt[..., None, :]
            total = sum(weights[..., i, None, None] * S[i] for i in range(min(L, t.bit_length() + 1)))
            outputs.append((scale * qt[..., None] * total).sum(-2))
    return LinearAttentionOutput(torch.stack(outputs, 1), None)
