"""A ReLU, and what it gives with its pairs of channels turned by their positions' angles.

    ring_la::relu_and_turn   y = ReLU(x),   (z_{2i}, z_{2i+1}) = (c y_{2i} - s y_{2i+1}, s y_{2i} + c y_{2i+1})

with c the cosine of channel 2i and s the sine of channel 2i + 1, as Diffusers has its tables. On CUDA a registered
operator, by Triton where it can; elsewhere PyTorch's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import Operator, kernels_of


def relu_and_turn(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """y and z ``[B, T, H, D]`` in x's dtype, of ``x [B, T, H, D]`` and tables ``[1 or B, T, 1, D]``."""
    return relu_and_turn_op(x, cos, sin) if x.is_cuda else plain_relu_and_turn(x, cos, sin)


def plain_relu_and_turn(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y = F.relu(x)
    y1, y2 = y.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    z = torch.empty_like(y)  # each half is rounded where it is written
    z[..., 0::2], z[..., 1::2] = y1 * c - y2 * s, y1 * s + y2 * c
    return y, z


def _relu_and_turn(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    kernels = kernels_of("turned", x, cos, sin)
    if kernels is not None:
        return kernels.forward(x, cos, sin)
    y, z = plain_relu_and_turn(x, cos, sin)
    return y.contiguous(), z.contiguous()


def _relu_and_turn_backward(grads: Sequence[Tensor | None], x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """The gradient of x: those of z turned back, and those of y."""
    dy, dz = grads
    total = torch.zeros_like(x) if dy is None else dy
    if dz is not None:
        z1, z2 = dz.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[..., 0::2], sin[..., 1::2]
        total = total + torch.stack([z1 * c + z2 * s, z2 * c - z1 * s], -1).flatten(-2)
    return [torch.where(x > 0, total, 0).to(x.dtype)]


def _fake(x, cos, sin):
    return x.new_empty(x.shape), x.new_empty(x.shape)


relu_and_turn_op = Operator("relu_and_turn", _relu_and_turn, _relu_and_turn_backward, _fake, 1)
