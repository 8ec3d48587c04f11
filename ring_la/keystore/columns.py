"""One token of each sequence over a rank's keys of it, side by side in columns: by products. `decode_kernel.py` does
it in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..softmax.products import product


class Columns(NamedTuple):
    """What the tokens of N sequences see."""

    k: Tensor
    """``[N, heads, columns, K]``, any strides but the last."""
    v: Tensor | None
    """``[N, heads, columns, V]``; None: keys are the values."""
    begin: Tensor
    """The first column of each sequence, int64 ``[N]``."""
    end: Tensor
    """The one behind the last."""
    q2: Tensor | None = None
    """``[N, H, R]``: more of a query, which meets `k2`."""
    k2: Tensor | None = None
    """``[N, heads, columns, R]``."""


def by_products(q: Tensor, keys: Columns, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """What ``q [N, H, K]`` reads: o ``[N, H, V]`` and lse ``[N, H]``, wide; of a token that sees nothing 0 and −∞."""
    heads, columns = keys.k.shape[1:3]
    scores = _scores(q, keys.k)
    if keys.q2 is not None and keys.k2 is not None:
        scores = scores + _scores(keys.q2, keys.k2)
    scores = scores * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    column = torch.arange(columns, device=q.device)
    seen = (column >= keys.begin[:, None]) & (column < keys.end[:, None])
    scores = scores.masked_fill(~seen.repeat_interleave(heads, 0)[:, None], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(torch.isneginf(lse), 0.0, lse))
    values = keys.k if keys.v is None else keys.v
    o = product(weights, values.flatten(0, 1))
    return o.unflatten(0, (-1, heads)).flatten(1, 2), lse.unflatten(0, (-1, heads)).flatten(1)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """``q [N, H, ·]`` with the keys: ``[N heads, H / heads, columns]``, wide."""
    return product(q.unflatten(1, (keys.shape[1], -1)).flatten(0, 1), keys.flatten(0, 1).mT)
