"""Attention to chosen keys, dense: a loop over queries that takes its keys one choice at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_la.outputs import AttentionOutput
from ring_la.reference.arguments import expect_local, expect_shape


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    block: int = 1,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    layout: object = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    backend: str | None = None,
) -> AttentionOutput:
    """Softmax over the keys ``c … c + block − 1`` of each choice c that are of the query's document and in its reach.

    q [B, Tq, H, K]; k [B, Tk, Hk, K]; v [B, Tk, Hk, V]; chosen [B, Tq, Hk or 1, S], −1 where nothing is chosen; the
    rest as `attention`. Returns `AttentionOutput(o [B, Tq, H, V], lse [B, H, Tq])` in float64.
    """
    expect_local(layout, backend)
    expect_shape("q", q, B=None, Tq=None, H=None, K=None)
    (B, Tq, H, K), (Tk, Hk) = q.shape, k.shape[1:3]
    expect_shape("k", k, B=B, Tk=None, Hk=None, K=K)
    expect_shape("v", v, B=B, Tk=Tk, Hk=Hk, V=None)
    expect_shape("chosen", chosen, B=B, Tq=Tq, heads=(1, Hk), S=None)
    borders = [0, Tk] if cu_seqlens is None else torch.as_tensor(cu_seqlens).tolist()
    document = [n for n, (a, b) in enumerate(zip(borders, borders[1:])) for _ in range(a, b)]
    factor, limits = float(K**-0.5) if scale is None else scale, (window[0], 0 if causal else window[1])
    rows = []
    for b in range(B):
        for t in range(Tq):
            for h in range(H):
                g = h // (H // Hk)
                choices = chosen[b, t, g % chosen.shape[2]].tolist()
                keys = _read(choices, block, t + Tk - Tq, document, limits)
                s = factor * (k[b, keys, g].double() @ q[b, t, h].double())
                rows.append(_row(s, v[b, keys, g].double(), None if sinks is None else sinks[h].double()))
    o, lse = (torch.stack(x).view(B, Tq, H, *x[0].shape) for x in zip(*rows))
    return AttentionOutput(o, lse.transpose(1, 2))


def _row(s: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and lse of one query, of its scores [n] and values [n, V]."""
    logits = s if sink is None else torch.cat([s, sink[None]])
    lse = torch.logsumexp(logits, 0) if len(logits) else s.new_tensor(-torch.inf)
    return torch.exp(s - lse) @ v if len(s) else v.new_zeros(v.shape[1]), lse


def _read(chosen: Sequence[int], block: int, place: int, document: Sequence[int], limits: tuple[int, int]) -> list[int]:
    """The keys of a query's choices that are of its document and at most so far behind and ahead of it (−1: any)."""
    first = place - limits[0] if limits[0] >= 0 else 0
    last = place + limits[1] if limits[1] >= 0 else len(document) - 1
    keys = (j for c in chosen if c >= 0 for j in range(c, min(c + block, len(document))))
    return [j for j in keys if document[j] == document[place] and first <= j <= last]
