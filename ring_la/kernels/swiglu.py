"""The product inside a SwiGLU, ``SiLU(gate) ⊙ up``, of both halves of one projection: one pass each way on CUDA.

Elsewhere, and in what a compiler traces (which fuses them itself), PyTorch's own operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import first_derivative_only, traced
from .backends import triton_installed


def swiglu(y: Tensor) -> Tensor:
    """``SiLU(y[…, :D]) ⊙ y[…, D:]`` of ``y […, 2 D]``, in y's dtype."""
    if not traced(y) and y.is_cuda and triton_installed():
        from .triton.swiglu import unsupported

        if not unsupported(y):
            return _SwiGLU.apply(y)
    return plain_swiglu(y)


def plain_swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        from .triton.swiglu import forward

        ctx.save_for_backward(y)
        return forward(y)

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor) -> Tensor:
        from .triton.swiglu import backward

        return backward(do, *ctx.saved_tensors)
