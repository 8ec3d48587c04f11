"""The lightning indexer's loss and its gradients in PyTorch, for some queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..softmax.products import product
from .chosen import Rows

NUMBERS = 1 << 24
"""Numbers of chosen keys that exist at once in the loss, on a CPU."""
ON_GPUS = 1 << 28
"""The same on a GPU, which many small strips would leave idle."""


def with_gradients(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    chosen: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    scale: float,
    rows: Rows,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L and its gradients for q, k and w: each strip of queries gathers its keys once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=q.device)
    dq, dk, dw = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, w))  # dense: k was gathered
    (B, T, S), width = chosen.shape, k.shape[2] + attention_k.shape[2:].numel()
    n = max(1, (ON_GPUS if q.is_cuda else NUMBERS) // max(1, B * S * width))
    batch = torch.arange(B, device=q.device)[:, None, None] * k.shape[1]
    rows_k, rows_attention = (x.flatten(0, 1) for x in (k, attention_k))  # whole rows are gathered the fastest
    for a in range(0, T, n):
        some = slice(a, min(a + n, T))
        at = chosen[:, some].long()
        seen = (at >= rows.starts[some, None]) & (at <= rows.tokens[some, None])
        at = torch.where(seen, at, 0)
        flat = (at + batch).flatten()
        read = rows_attention.index_select(0, flat).unflatten(0, at.shape)
        p = _attended(attention_q[:, some], read, seen, scale, None if lse is None else lse[:, :, some])
        keys, q_, w_ = rows_k.index_select(0, flat).unflatten(0, at.shape), q[:, some], w[:, some].to(wide)
        raw = product(q_.flatten(0, 1), keys.flatten(0, 1).mT).unflatten(0, at.shape[:2])  # [B, n, Hi, S]
        keys, q_ = keys.to(wide), q_.to(wide)
        s = (w_[:, :, None] @ torch.relu(raw))[:, :, 0].masked_fill(~seen, -torch.inf)
        log = torch.where(seen, s - torch.logsumexp(s, -1, keepdim=True), 0.0)
        loss += (torch.xlogy(p, p) - p * log).sum()
        ds = torch.where(seen, torch.exp(log) * p.sum(-1, keepdim=True) - p, 0.0)[:, :, None]  # [B, n, 1, S]
        dw[:, some] = (torch.relu(raw) * ds).sum(-1)
        draw = (raw > 0) * ds * w_[..., None]
        dq[:, some] = draw @ keys
        dk.view(-1, k.shape[2]).index_add_(0, flat, (draw.mT @ q_).flatten(0, 2))
    return loss, dq.to(q.dtype), dk.to(k.dtype), dw.to(w.dtype)


def _attended(q: Tensor, k: Tensor, seen: Tensor, scale: float, lse: Tensor | None) -> Tensor:
    """p ``[B, n, S]``: how much attention, of `lse` ``[B, H, n]`` if it is known, gives each chosen key
    ``k [B, n, S, Hk, K]``, the mean of all heads."""
    B, n, _, K = q.shape
    grouped = q.reshape(B * n * k.shape[3], -1, K)
    s = scale * product(grouped, k.transpose(2, 3).flatten(0, 2).mT).unflatten(0, (B, n, -1))  # [B, n, Hk, G, S]
    s = s.masked_fill(~seen[:, :, None, None], -torch.inf)
    if lse is None:
        of_all = torch.logsumexp(s, -1, keepdim=True)
    else:
        of_all = lse.to(s.dtype).transpose(1, 2).unflatten(2, (k.shape[3], -1))[..., None]
    p = torch.exp(s - of_all)
    return torch.where(seen, p.mean((2, 3)), 0.0)
