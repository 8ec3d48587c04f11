"""The skip around a recurrence, ``o = y + D ⊙ x``: one pass each way on CUDA, PyTorch's own operations elsewhere.

A compiler fuses PyTorch's operations as well, so what traces a call sees those, and there is no operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...autograd import bare, first_derivative_only, traced
from .operator import kernels_of


def skip(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """``y + D ⊙ x`` in x's dtype, computed in fp32 or wider.

    Args:
        y, x: ``[B, T, H, V]``. D: ``[H]`` or ``[H, V]``.
    """
    kernels = None if traced(x) else kernels_of("skip", x, y)
    if kernels is None:
        return plain_skip(y, x, D)
    return kernels.forward(y, x, D) if bare(y, x, D) else _Skip.apply(y, x, D)


def plain_skip(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (y + (D if D.dim() == 2 else D[:, None]).to(wide) * x.to(wide)).to(x.dtype)


class _Skip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, x: Tensor, D: Tensor) -> Tensor:
        from .skip_kernel import forward

        ctx.save_for_backward(x, D)
        ctx.dtype = y.dtype
        return forward(y, x, D)

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from .skip_kernel import backward

        return do.to(ctx.dtype), *backward(do, *ctx.saved_tensors)
