"""Sums of rows that belong together: of entries ``y [M, D]``, each in one of R bags, weighed or not.

    o_r = Σ_{e in r} w_e y_e,      dy_e = w_e do_{r(e)},      dw_e = do_{r(e)} · y_e

Bag r has ``entries[starts[r] : starts[r + 1]]``. By Triton on CUDA where it can, elsewhere PyTorch's own operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import kernels_of


def bag_sums(y: Tensor, weight: Tensor | None, entries: Tensor, starts: Tensor) -> Tensor:
    """The sums ``[R, D]`` in y's dtype; weight ``[M]`` or None, entries int64 ``[M]``, starts int64 ``[R + 1]``."""
    kernels = kernels_of("bags", y)
    return plain_sums(y, weight, entries, starts) if kernels is None else kernels.forward(y, weight, entries, starts)


def bag_gradients(do: Tensor, y: Tensor, weight: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y and of the weight, in their dtypes, of ``do [R, D]``; row int64 ``[M]``: the bag of each entry."""
    kernels = kernels_of("bags", y)
    return plain_gradients(do, y, weight, row) if kernels is None else kernels.backward(do, y, weight, row)


def plain_sums(y: Tensor, weight: Tensor | None, entries: Tensor, starts: Tensor) -> Tensor:
    if not len(entries) or len(starts) == 1:
        return y.new_zeros(len(starts) - 1, y.shape[1])
    weighed = y.contiguous() if weight is None else y * weight[:, None].to(y.dtype)
    return F.embedding_bag(entries, weighed, starts, mode="sum", include_last_offset=True)


def plain_gradients(do: Tensor, y: Tensor, weight: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    mine = do.index_select(0, row)
    wide = torch.promote_types(y.dtype, torch.float32)
    return mine * weight[:, None].to(mine.dtype), (mine.to(wide) * y).sum(1).to(weight.dtype)
