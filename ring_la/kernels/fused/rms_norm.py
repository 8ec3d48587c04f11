"""RMS norm with an optional gate, ``o = x / rms(x) ⊙ weight ⊙ act(gate)`` over the last dimension.

    ring_la::rms_norm   ring_la::rms_norm_backward

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import Operator, fused, kernels_of


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None = None, *, silu: bool = True, eps: float = 1e-6) -> Tensor:
    """``x / rms(x) ⊙ weight``, and ``⊙ silu(gate)`` (or sigmoid) where there is a gate; computed in fp32 or wider.

    Args:
        x: ``[…, D]``. weight: ``[D]``. gate: like x.
    """
    if not fused(x):
        return plain_rms_norm(x, weight, gate, silu, eps)
    return rms_norm_op(x, weight, gate, silu, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    if gate is not None:
        y = y * (F.silu if silu else torch.sigmoid)(gate.to(wide))
    return y.to(x.dtype)


def plain_rms_norm_backward(
    do: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and gate."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, g, w = x.to(wide), do.to(wide), weight.to(wide)
    r = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y * r
    a, dgate = torch.ones((), dtype=wide, device=x.device), None
    if gate is not None:
        z = gate.to(wide)
        s = torch.sigmoid(z)
        a = z * s if silu else s
        dgate = (g * w * y * (s * (1 + z * (1 - s)) if silu else s * (1 - s))).to(gate.dtype)
    h = g * w * a
    dx = r * (h - y * (h * y).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * y * a).flatten(0, -2).sum(0).to(weight.dtype), dgate


def _rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float) -> Tensor:
    kernels = kernels_of("rms_norm", x)
    if kernels is None:
        return plain_rms_norm(x, weight, gate, silu, eps).contiguous()
    return kernels.forward(x, weight, gate, silu, eps)


def _rms_norm_backward(
    do: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, silu: bool, eps: float
) -> list[Tensor]:
    """Gradients of x and the weight, then of the gate where there is one."""
    kernels = kernels_of("rms_norm", x)
    backward = plain_rms_norm_backward if kernels is None else kernels.backward
    return [g.contiguous() for g in backward(do, x, weight, gate, silu, eps) if g is not None]


def _fake(x, weight, gate, silu, eps):
    return x.new_empty(x.shape)


rms_norm_op = Operator("rms_norm", _rms_norm, _rms_norm_backward, _fake, 3)
