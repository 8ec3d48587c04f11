"""Log-decays as recurrences take them, of a projection: ``g = −factor · e^{A_log} · softplus(sign · (a + bias))``.

    ring_la::log_decay   ring_la::log_decay_backward

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations, which have derivatives of
every order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import Operator, fused, kernels_of


def decay_gate(
    a: Tensor, A_log: Tensor | None = None, bias: Tensor | None = None, *, sign: float = 1.0, factor: float = 1.0
) -> Tensor:
    """The log-decay ``g = −factor · e^{A_log} · softplus(sign · (a + bias))``, fp32 (fp64 for fp64), shaped like `a`.

    With sign −1 and no A_log it is ``factor · logsigmoid(a + bias)``.

    Args:
        a: ``[…, C]``. A_log: ``[H]``, shared by C / H consecutive channels; None: zeros. bias: ``[C]``.
    """
    if not fused(a):
        return plain_log_decay(a, A_log, bias, sign, factor)
    return log_decay(a, A_log, bias, sign, factor)


def _pieces(a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float) -> tuple[Tensor, Tensor]:
    """What the softplus is of, and what multiplies it."""
    wide = torch.promote_types(a.dtype, torch.float32)
    y = a.to(wide) if bias is None else a.to(wide) + bias.to(wide)
    scale = torch.full((), -factor, dtype=wide, device=a.device)
    if A_log is not None:
        scale = (-factor * A_log.to(wide).exp()).repeat_interleave(a.shape[-1] // A_log.shape[0])
    return y if sign == 1 else sign * y, scale


def plain_log_decay(a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float) -> Tensor:
    y, scale = _pieces(a, A_log, bias, sign, factor)
    return scale * F.softplus(y)


def plain_log_decay_backward(
    dg: Tensor, a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of a, A_log and bias."""
    y, scale = _pieces(a, A_log, bias, sign, factor)
    da = dg * scale * sign * torch.sigmoid(y)
    dA, dbias = None, None
    if A_log is not None:
        dA = (dg * scale * F.softplus(y)).flatten(0, -2).sum(0).view(A_log.shape[0], -1).sum(1).to(A_log.dtype)
    if bias is not None:
        dbias = da.flatten(0, -2).sum(0).to(bias.dtype)
    return da.to(a.dtype), dA, dbias


def _log_decay(a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float) -> Tensor:
    """See `decay_gate`."""
    kernels = kernels_of("log_decay", a)
    if kernels is None:
        return plain_log_decay(a, A_log, bias, sign, factor).contiguous()
    return kernels.forward(a, A_log, bias, sign, factor)


def _log_decay_backward(
    dg: Tensor, a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float
) -> list[Tensor]:
    """Gradients of a, then of A_log and the bias where they are given."""
    kernels = kernels_of("log_decay", a)
    backward = plain_log_decay_backward if kernels is None else kernels.backward
    return [g.contiguous() for g in backward(dg, a, A_log, bias, sign, factor) if g is not None]


def _fake(a, A_log, bias, sign, factor):
    return a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, torch.float32))


log_decay = Operator("log_decay", _log_decay, _log_decay_backward, _fake, 3)
