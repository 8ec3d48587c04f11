"""A softmax over the last dimension that is not rounded to what it is taken of: in fp32, or wider.

    ring_la::wide_softmax   ring_la::wide_softmax_backward

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations, which have derivatives of
every order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operator import Operator, fused, kernels_of


def softmax_in_fp32(x: Tensor) -> Tensor:
    """The softmax of ``x [..., D]``, fp32 (fp64 of fp64); the gradient of x is in its dtype."""
    return wide_softmax(x) if fused(x) else plain_wide_softmax(x)


def plain_wide_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))


def plain_wide_softmax_backward(dw: Tensor, x: Tensor) -> Tensor:
    w = plain_wide_softmax(x)
    return (w * (dw - (w * dw).sum(-1, keepdim=True))).to(x.dtype)


def _wide_softmax(x: Tensor) -> Tensor:
    """See `softmax_in_fp32`."""
    kernels = kernels_of("wide_softmax", x)
    return plain_wide_softmax(x).contiguous() if kernels is None else kernels.forward(x)


def _wide_softmax_backward(dw: Tensor, x: Tensor) -> list[Tensor]:
    kernels = kernels_of("wide_softmax", x)
    backward = plain_wide_softmax_backward if kernels is None else kernels.backward
    return [backward(dw, x).contiguous()]


def _fake(x):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


wide_softmax = Operator("wide_softmax", _wide_softmax, _wide_softmax_backward, _fake, 1)
