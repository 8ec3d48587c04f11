"""Forgetting attention as its definition has it: dense, document by document, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_la.outputs import AttentionOutput
from ring_la.reference.arguments import documents, expect_local, expect_shape


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    window: int = -1,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: str | None = None,
) -> AttentionOutput:
    """Softmax attention whose scores fall by what heads forget between key and query (Lin et al. 2025, eq. 4)."""
    expect_local(layout, backend)
    B, T, H, K = q.shape
    expect_shape("g", g, B=B, T=T, H=H)
    k, v = (x.double().repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    outputs, sums = [], []
    for d in documents(B, T, cu_seqlens):
        qd, kd, vd, gd = (x[d.rows, d.tokens].double() for x in (q, k, v, g))
        total = gd.cumsum(1).transpose(1, 2)
        scores = torch.einsum("bihk,bjhk->bhij", qd, kd) * (K**-0.5 if scale is None else scale)
        scores = scores + total[..., :, None] - total[..., None, :]
        ahead = torch.arange(qd.shape[1], device=q.device)
        ahead = ahead[:, None] - ahead
        seen = (ahead >= 0) & (ahead <= (T if window < 0 else window))
        scores = scores.masked_fill(~seen, -torch.inf)
        sums.append(scores.logsumexp(-1))
        outputs.append(torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), vd))
    return AttentionOutput(torch.cat(outputs, 1), torch.cat(sums, 2))
