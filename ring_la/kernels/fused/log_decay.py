"""Log-decays as recurrences take them, of a projection: ``g = −factor · e^{A_log} · softplus(sign · (a + bias))``, or
`bounded`, ``g = −factor · sigmoid(e^{A_log} · sign · (a + bias))``.

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
    return _log_decay_of(a, A_log, bias, sign, factor, False)


def bounded_decay_gate(
    a: Tensor, A_log: Tensor | None = None, bias: Tensor | None = None, *, lower_bound: float
) -> Tensor:
    """The log-decay ``g = lower_bound · sigmoid(e^{A_log} · (a + bias))``, which is never below `lower_bound` < 0.

    Shapes and dtypes as of `decay_gate`.
    """
    return _log_decay_of(a, A_log, bias, 1.0, -float(lower_bound), True)


def _log_decay_of(
    a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float, bounded: bool
) -> Tensor:
    return (log_decay if fused(a) else plain_log_decay)(a, A_log, bias, sign, factor, bounded)


def _pieces(a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float) -> tuple[Tensor, Tensor | None]:
    """y, and e^{A_log} of each channel."""
    wide = torch.promote_types(a.dtype, torch.float32)
    y = a.to(wide) if bias is None else a.to(wide) + bias.to(wide)
    rate = None if A_log is None else A_log.to(wide).exp().repeat_interleave(a.shape[-1] // A_log.shape[0])
    return y if sign == 1 else sign * y, rate


def _times(x: Tensor, rate: Tensor | None) -> Tensor:
    return x if rate is None else x * rate


def plain_log_decay(
    a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float, bounded: bool
) -> Tensor:
    y, rate = _pieces(a, A_log, bias, sign)
    return -factor * (torch.sigmoid(_times(y, rate)) if bounded else _times(F.softplus(y), rate))


def plain_log_decay_backward(
    dg: Tensor, a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float, bounded: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of a, A_log and bias."""
    y, rate = _pieces(a, A_log, bias, sign)
    if bounded:
        z = _times(y, rate)
        slope = torch.sigmoid(z) * torch.sigmoid(-z)
        of_rate = slope * z
    else:
        slope, of_rate = torch.sigmoid(y), _times(F.softplus(y), rate)
    da = -factor * sign * dg * _times(slope, rate)
    dA, dbias = None, None
    if A_log is not None:
        dA = (-factor * dg * of_rate).flatten(0, -2).sum(0).view(A_log.shape[0], -1).sum(1).to(A_log.dtype)
    if bias is not None:
        dbias = da.flatten(0, -2).sum(0).to(bias.dtype)
    return da.to(a.dtype), dA, dbias


def _log_decay(
    a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float, bounded: bool
) -> Tensor:
    """See `decay_gate` and `bounded_decay_gate`."""
    kernels = kernels_of("log_decay", a)
    if kernels is None:
        return plain_log_decay(a, A_log, bias, sign, factor, bounded).contiguous()
    return kernels.forward(a, A_log, bias, sign, factor, bounded)


def _log_decay_backward(
    dg: Tensor, a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float, bounded: bool
) -> list[Tensor]:
    """Gradients of a, then of A_log and the bias where they are given."""
    kernels = kernels_of("log_decay", a)
    backward = plain_log_decay_backward if kernels is None else kernels.backward
    return [g.contiguous() for g in backward(dg, a, A_log, bias, sign, factor, bounded) if g is not None]


def _fake(a, A_log, bias, sign, factor, bounded):
    return a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, torch.float32))


log_decay = Operator("log_decay", _log_decay, _log_decay_backward, _fake, 3)
