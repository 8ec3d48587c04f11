"""What recurrences are given, from what projections give: q and k of unit length, log-decays, Mamba-2's time step.

    ring_la::unit_length   ring_la::log_decay   ring_la::discretise   and their …_backward

On CUDA registered operators, by Triton where it can; elsewhere PyTorch's own operations, which have derivatives of
every order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..choice import triton_installed
from .operator import Operator, fused


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x · rsqrt(Σ x² + eps)`` over the last dimension, in fp32 or wider."""
    if not fused(x) or x.dim() != 4:
        return plain_unit_length(x, eps)
    return unit_length(x, eps)


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


def discretise(
    x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None = None, *, softplus: bool = False
) -> tuple[Tensor, Tensor]:
    """``Δ = dt + bias``, through a softplus if asked for: (``Δ x`` in x's dtype, ``Δ A`` in fp32 or wider).

    Args:
        x: ``[B, T, H, V]``. dt: ``[B, T, H]``. A, bias: ``[H]``.
    """
    if not fused(x):
        return plain_discretise(x, dt, A, bias, softplus)
    return discretise_op(x, dt, A, bias, softplus)


# -- in PyTorch ----------------------------------------------------------------------------------------------


def plain_unit_length(x: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)).to(x.dtype)


def plain_unit_length_backward(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y, g = x.to(wide), dy.to(wide)
    r = torch.rsqrt((y * y).sum(-1, keepdim=True) + eps)
    return (r * (g - y * (r * r) * (y * g).sum(-1, keepdim=True))).to(x.dtype)


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


def plain_discretise(x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    step = dt.to(wide) if bias is None else dt.to(wide) + bias.to(wide)
    step = F.softplus(step) if softplus else step
    return (step[..., None] * x).to(x.dtype), step * A.to(wide)


def plain_discretise_backward(
    dv: Tensor, dg: Tensor, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, dt, A and bias."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z = dt.to(wide) if bias is None else dt.to(wide) + bias.to(wide)
    step = F.softplus(z) if softplus else z
    ddt = (dv.to(wide) * x.to(wide)).sum(-1) + dg * A.to(wide)
    ddt = ddt * torch.sigmoid(z) if softplus else ddt
    dbias = None if bias is None else ddt.sum((0, 1)).to(bias.dtype)
    dx = (step[..., None] * dv.to(wide)).to(x.dtype)
    return dx, ddt.to(dt.dtype), (dg * step).sum((0, 1)).to(A.dtype), dbias


# -- the operators -------------------------------------------------------------------------------------------


def _triton_norm(x: Tensor) -> bool:
    if not (x.is_cuda and triton_installed()):
        return False
    from .unit_length_kernel import unsupported

    return not unsupported(x)


def _unit_length(x: Tensor, eps: float) -> Tensor:
    """`l2norm` of ``x [B, T, H, D]``."""
    if _triton_norm(x):
        from .unit_length_kernel import unit

        return unit(x, None, eps)
    return plain_unit_length(x, eps).contiguous()


def _unit_length_backward(dy: Tensor, x: Tensor, eps: float) -> list[Tensor]:
    if _triton_norm(x):
        from .unit_length_kernel import unit

        return [unit(x, dy, eps)]
    return [plain_unit_length_backward(dy, x, eps).contiguous()]


def _fake_unit_length(x, eps):
    return x.new_empty(x.shape)


unit_length = Operator("unit_length", _unit_length, _unit_length_backward, _fake_unit_length, 1)


def _triton_decay(a: Tensor) -> bool:
    if not (a.is_cuda and triton_installed()):
        return False
    from .log_decay_kernel import unsupported

    return not unsupported(a)


def _log_decay(a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float) -> Tensor:
    """See `decay_gate`."""
    if _triton_decay(a):
        from .log_decay_kernel import forward

        return forward(a, A_log, bias, sign, factor)
    return plain_log_decay(a, A_log, bias, sign, factor).contiguous()


def _log_decay_backward(
    dg: Tensor, a: Tensor, A_log: Tensor | None, bias: Tensor | None, sign: float, factor: float
) -> list[Tensor]:
    """Gradients of a, then of A_log and the bias where they are given."""
    if _triton_decay(a):
        from .log_decay_kernel import backward
    else:
        backward = plain_log_decay_backward
    return [g.contiguous() for g in backward(dg, a, A_log, bias, sign, factor) if g is not None]


def _fake_log_decay(a, A_log, bias, sign, factor):
    return a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, torch.float32))


log_decay = Operator("log_decay", _log_decay, _log_decay_backward, _fake_log_decay, 3)


def _triton_discretise(x: Tensor) -> bool:
    if not (x.is_cuda and triton_installed()):
        return False
    from .discretise_kernel import unsupported

    return not unsupported(x)


def _discretise(x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """See `discretise`."""
    if _triton_discretise(x):
        from .discretise_kernel import forward

        return forward(x, dt, A, bias, softplus)
    v, g = plain_discretise(x, dt, A, bias, softplus)
    return v.contiguous(), g.contiguous()


def _discretise_backward(
    dv: Tensor | None, dg: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool
) -> list[Tensor]:
    """Gradients of x, dt and A, then of the bias where it is given."""
    dv = torch.zeros_like(x) if dv is None else dv
    dg = torch.zeros_like(dt, dtype=torch.promote_types(x.dtype, torch.float32)) if dg is None else dg
    if _triton_discretise(x):
        from .discretise_kernel import backward
    else:
        backward = plain_discretise_backward
    return [d.contiguous() for d in backward(dv, dg, x, dt, A, bias, softplus) if d is not None]


def _fake_discretise(x, dt, A, bias, softplus):
    return x.new_empty(x.shape), dt.new_empty(dt.shape, dtype=torch.promote_types(x.dtype, torch.float32))


discretise_op = Operator("discretise", _discretise, _discretise_backward, _fake_discretise, 4)
