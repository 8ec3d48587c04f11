"""How a case's tensors lie in memory: the same numbers at other strides, beside NaN that nobody may read."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor

from .case import Case

WAYS = ("apart", "part", "turned", "heads", "rows")
"""Channels two apart; rows inside of wider ones; the last two dimensions, heads and tokens, rows and tokens turned."""
EXPANDED = {"of one head": 2, "of one token": 1}
"""One of a dimension in the place of all, by `expand`."""


def level(case: Case, x: Tensor) -> Tensor:
    """The numbers of `x`; where the case's tensors are expanded, those of the first in the place of all."""
    dim = EXPANDED.get(case.how.get("strides", ""), x.dim())
    return x.narrow(dim, 0, 1).expand_as(x) if x.dim() > 2 and dim < x.dim() and x.shape[dim] else x


def lain(case: Case, name: str, x: Tensor) -> Tensor:
    """The numbers of `x` as a leaf that lies in the case's way; "mixed": each name in one of its own."""
    way = case.how.get("strides")
    if way == "mixed":
        way = Random(f"{case.seed}/{name}").choice((None, *WAYS))
    if way in EXPANDED:
        one = level(case, x.detach().clone())
        return one if torch.equal(one, x) else x.detach().clone()
    return x.detach().clone() if way is None else _lain(x.detach(), way)


def _lain(x: Tensor, way: str) -> Tensor:
    if way in ("apart", "part") and x.dim():
        shape = (*x.shape[:-1], 2 * x.shape[-1]) if way == "apart" else (*x.shape[:-1], x.shape[-1] + 3)
        wide = torch.full(shape, math.nan, dtype=x.dtype)
        out = wide[..., ::2] if way == "apart" else wide[..., 1 : x.shape[-1] + 1]
        return out.copy_(x).detach()
    pair = {"turned": (-2, -1), "heads": (1, 2), "rows": (0, 1)}.get(way, (0, 0))
    if x.dim() < 2 or max(pair) >= x.dim():
        return x.clone()
    return x.transpose(*pair).contiguous().transpose(*pair)
