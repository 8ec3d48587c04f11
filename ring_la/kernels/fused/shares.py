"""What each token's weight is of all weights so far, channel by channel, in one pass over the tokens of one device.

    ring_la::shares   ring_la::shares_backward

    z ← log(e^z + e^x),        share = e^(x − z),    g = log(1 − share)

On CUDA, where Triton can take it; the recurrences that have it go by their parts elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .operator import Operator, kernels_of


def can_share(x: Tensor, *others: Tensor) -> bool:
    """Whether there is a kernel for weights like x."""
    return kernels_of("shares", x, *others) is not None


def weight_shares(x: Tensor, z: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(share in x's dtype, g in fp32 ``[B, T, D]``, z after each document ``[N, D]`` fp32).

    Args:
        x: logarithms of weights ``[B, T, D]``. z: that of the sum before each document ``[N, D]``, fp32 and finite.
        cu: offsets ``[N+1]`` of documents in one row; None: N is B.
    """
    return shares_op(x, z, cu)


def _shares(x: Tensor, z: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    from .shares_kernel import forward

    share, g, end = forward(x, z, cu)
    return share, g, end


def _shares_backward(
    grads: Sequence[Tensor | None], x: Tensor, z: Tensor, cu: Tensor | None, g: Tensor
) -> list[Tensor]:  # fmt: skip
    """Gradients of x and z."""
    from .shares_kernel import backward

    dx, dz = backward(*grads, x, g, cu)
    return [dx, dz.to(z.dtype)]


def _fake(x, z, cu):
    wide = torch.float32
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=wide), z.new_empty(z.shape, dtype=wide)


shares_op = Operator("shares", _shares, _shares_backward, _fake, 2, keeps=(1,))
