"""Projections of one more token of each sequence, with the norm before them and what follows.

Of one sequence each weight is read once and there is one launch a call. Of several PyTorch's products are as good, but
for those of a few rows, which stay on the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fused.rms_norm import rms_norm
from ..fused.swiglu import swiglu

SMALL = 256
"""Rows of a weight that many sequences may read each for itself."""


class PreNorm(NamedTuple):
    """The RMS norm before a layer."""

    weight: Tensor
    """``[D]``."""
    eps: float


def normed_products(x: Tensor, norm: PreNorm, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """``x [N, D]``, normalised, through some linear layers: ``[N, Di]`` each, rows any distance apart."""
    weights = [linear.weight for linear in linears]
    together = [w for w in weights if len(x) == 1 or w.shape[0] <= SMALL]
    found = iter(_few(x, together, norm).split([w.shape[0] for w in together], 1) if together else ())
    y = x if len(together) == len(weights) else rms_norm(x, norm.weight, eps=norm.eps)
    return [next(found) if any(w is one for one in together) else F.linear(y, w) for w in weights]


def normed_swiglu(x: Tensor, norm: PreNorm, linear: nn.Linear) -> Tensor:
    """``SiLU(gate) ⊙ up`` of the halves of ``x [N, D]``, normalised, through a linear layer: ``[N, D' / 2]``."""
    if len(x) == 1:
        return _few(x, [linear.weight], norm, swiglu=True)
    return swiglu(F.linear(rms_norm(x, norm.weight, eps=norm.eps), linear.weight))


def added_product(x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
    """``x [N, D']`` and ``y [N, D]``, which may be wider, through a linear layer."""
    return _few(y, [linear.weight], added=x) if len(x) == 1 else torch.addmm(x, y.to(x.dtype), linear.weight.T)


def _few(
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
