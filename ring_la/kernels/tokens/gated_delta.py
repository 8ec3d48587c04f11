"""A token of a gated delta net between its projections, in one launch: see `gated_delta_kernel`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGEST = 128
"""Channels of a head whose state a program's registers have room for."""


class Weights(NamedTuple):
    """Of a layer, beside its projections."""

    conv: Tensor
    """``[2 HK K + H V, W]``."""
    A_log: Tensor
    """``[H]``."""
    dt_bias: Tensor
    """``[H]``."""
    norm: Tensor
    """``[V]``."""


def fits(x: Tensor, state: Tensor) -> bool:
    """Whether the kernel takes tokens like x with such a state."""
    narrow = state.dtype == torch.float32 and x.dtype != torch.float64
    return narrow and max(state.shape[-2:]) <= LARGEST and state.is_contiguous()


def gated_delta_token(
    qkv: Tensor, b: Tensor, a: Tensor, z: Tensor, weights: Weights, tail: Tensor, state: Tensor, heads: int,
    **options: Any,
) -> Tensor:  # fmt: skip
    """As `gated_delta_kernel.gated_delta_token`, which needs Triton."""
    from . import gated_delta_kernel

    return gated_delta_kernel.gated_delta_token(qkv, b, a, z, weights, tail, state, heads, **options)
