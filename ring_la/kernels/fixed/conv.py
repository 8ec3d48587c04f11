"""Launches of the short convolution block by block, and of its gradients (`conv_device`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_la.kernels.fixed.conv_device import conv_back_kernel, conv_forward_kernel
from ring_la.kernels.runtime.launch import aligned, filled, launch
from ring_la.kernels.sizes import cdiv, power_of_2

CHANNELS, REGISTERS = 128, 128
"""Of a program, one warp, and of its threads going back at most."""
FORWARD, BACK = 8, 4
"""Rows that are loaded together."""


def block_conv(x: Tensor, lead: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, silu: bool) -> Tensor:
    """o like ``x [rows, D]``, of blocks in pieces behind ``lead [pieces, W − 1, D]``.

    Args:
        table: int32 ``[blocks, 5]``: the start and the end of each block and of its piece, and the piece's number.
    """
    x, lead, weight = aligned(x), aligned(lead.to(x.dtype)), aligned(weight)
    o, wide = torch.empty_like(x), _channels(x)
    if len(table):
        launch(
            conv_forward_kernel, (len(table) * cdiv(x.shape[1], wide),), *filled(x, lead, weight, bias), table, o,
            D=x.shape[1], W=weight.shape[1], BD=wide, STEP=FORWARD, SILU=silu, BIAS=bias is not None, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return o


def block_conv_gradients(
    do: Tensor, dends: Tensor | None, x: Tensor, lead: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and the leads, and blocks' parts of the weight's and the bias's, fp32 ``[blocks, W+1, D]``.

    Args:
        dends: the gradients of each piece's last W − 1 rows, its lead's among them, ``[pieces, W − 1, D]``, of which
            those of the lead are not added here.
    """
    do, x, lead, weight = aligned(do), aligned(x), aligned(lead.to(x.dtype)), aligned(weight)
    dends = None if dends is None else aligned(dends.to(x.dtype))
    D, W, wide = x.shape[1], weight.shape[1], _channels(x)
    dx, dlead = torch.empty_like(x), torch.empty_like(lead)
    sums = torch.empty(len(table), W + 1, D, device=x.device)
    capped: dict[str, Any] = {"maxnreg": REGISTERS} if W <= 4 else {}
    if len(table):
        launch(
            conv_back_kernel, (len(table) * cdiv(D, wide),), *filled(x, lead, weight, bias), table,
            *filled(do, dends), dx, dlead, sums, D=D, W=W, BD=wide, STEP=BACK, SILU=silu, BIAS=bias is not None,
            ENDS=dends is not None, num_warps=1, enable_fp_fusion=False, **capped,
        )  # fmt: skip
    return dx, dlead, sums


def _channels(x: Tensor) -> int:
    return min(CHANNELS, max(32, power_of_2(x.shape[1])))
