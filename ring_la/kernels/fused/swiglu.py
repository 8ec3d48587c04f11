"""The product inside a SwiGLU, ``SiLU(gate) ⊙ up``, of both halves of one projection.

    ring_la::swiglu   ring_la::swiglu_backward

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import Operator, fused, kernels_of


def swiglu(y: Tensor) -> Tensor:
    """``SiLU(y[…, :D]) ⊙ y[…, D:]`` of ``y […, 2 D]``, in y's dtype."""
    if not fused(y):
        return plain_swiglu(y)
    return swiglu_op(y)


def plain_swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def plain_swiglu_backward(do: Tensor, y: Tensor) -> Tensor:
    """The gradient of y."""
    gate, up = y.chunk(2, -1)
    s = torch.sigmoid(gate)
    return torch.cat([do * up * (s * (1 + gate * (1 - s))), do * (gate * s)], -1)


def _swiglu(y: Tensor) -> Tensor:
    kernels = kernels_of("swiglu", y)
    return plain_swiglu(y) if kernels is None else kernels.forward(y)


def _swiglu_backward(do: Tensor, y: Tensor) -> list[Tensor]:
    kernels = kernels_of("swiglu", y)
    return [plain_swiglu_backward(do, y) if kernels is None else kernels.backward(do, y)]


def _fake(y):
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


swiglu_op = Operator("swiglu", _swiglu, _swiglu_backward, _fake, 1)
