"""Projections of one more token of each sequence, with the norm before them and what follows.

Of one sequence each weight is read once and there is one launch a call; of several PyTorch's products are as good, and
what stands around them is theirs too where they have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fused.rms_norm import rms_norm
from ..fused.swiglu import swiglu


class PreNorm(NamedTuple):
    """The RMS norm before a layer."""

    weight: Tensor
    """``[D]``."""
    eps: float


def normed_products(x: Tensor, norm: PreNorm, linears: Sequence[nn.Linear]) -> Tensor:
    """``x [N, D]``, normalised, through some linear layers, side by side ``[N, Σ Di]``."""
    weights = [linear.weight for linear in linears]
    if len(x) == 1:
        return _one(x, weights, norm)
    y = rms_norm(x, norm.weight, eps=norm.eps)
    out = x.new_empty(len(x), sum(w.shape[0] for w in weights))
    for part, w in zip(out.split([w.shape[0] for w in weights], 1), weights):
        torch.mm(y, w.T, out=part)
    return out


def normed_swiglu(x: Tensor, norm: PreNorm, linear: nn.Linear) -> Tensor:
    """``SiLU(gate) ⊙ up`` of the halves of ``x [N, D]``, normalised, through a linear layer: ``[N, D' / 2]``."""
    if len(x) == 1:
        return _one(x, [linear.weight], norm, swiglu=True)
    return swiglu(F.linear(rms_norm(x, norm.weight, eps=norm.eps), linear.weight))


def added_product(x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
    """``x [N, D']`` and ``y [N, D]``, which may be wider, through a linear layer."""
    return _one(y, [linear.weight], added=x) if len(x) == 1 else torch.addmm(x, y.to(x.dtype), linear.weight.T)


def _one(
    x: Tensor,
    weights: Sequence[Tensor],
    norm: PreNorm | None = None,
    *,
    swiglu: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    from .products_kernel import products  # needs Triton

    weight, eps = norm or (None, 0.0)
    return products(x.contiguous(), weights, weight, eps, swiglu=swiglu, added=added)
