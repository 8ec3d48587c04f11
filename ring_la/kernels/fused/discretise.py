"""Mamba-2's time step: what its recurrence writes, ``Δ x``, and its log-decay, ``Δ A``.

    ring_la::discretise   ring_la::discretise_backward

On CUDA a registered operator, by Triton where it can; elsewhere PyTorch's own operations, which have derivatives of
every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...autograd import first_derivative_only, traced, wanting
from ..choice import SHORT, triton_installed
from .operator import Operator, fused, kernels_of
from .skip import skip


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


STEP_INSIDE = True
"""Whether the recurrence's kernels multiply x by Δ themselves where they are known for it (`step_inside`)."""


def step_inside(x: Tensor, B: Tensor, D: Tensor | None) -> bool:
    """Whether a recurrence on one device writes x times Δ by kernels that read both: on Hopper, of heads of 64 channels
    an even number of which shares keys of 128 (`scalar_decay.chunk_gradients`), and more than a few tokens."""
    fits = B.dim() == 4 and (B.shape[-1], x.shape[-1]) == (128, 64) and x.shape[2] % (2 * B.shape[2]) == 0
    fits = fits and x.dtype.itemsize == 2 and x.shape[1] > SHORT and (D is None or D.dim() == 1)
    if not (STEP_INSIDE and fits and x.is_cuda and triton_installed()) or traced(x):
        return False
    from ..spans.plan import hopper

    return hopper(x.device)


def discretise_and_skip(
    x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor, *, softplus: bool = False
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """What `discretise` gives, and what adds the skip ``D ⊙ x`` to an output.

    One D a head and kernels for both: gradients through Δ and through the skip come of one pass.

    Args:
        D: ``[H]`` or ``[H, V]``.
    """
    one_pass = D.dim() == 1 and not traced(x) and wanting(x, dt, A, bias, D)
    if not one_pass or kernels_of("discretise", x) is None or kernels_of("skip", x, x) is None:
        v, g = discretise(x, dt, A, bias, softplus=softplus)
        return v, g, lambda y: skip(y, x, D)
    v, g, through = _Beside.apply(x, dt, A, bias, D, softplus)
    return v, g, lambda y: Added.apply(y, through, D.detach())


class _Beside(torch.autograd.Function):
    """Δ x, Δ A and x, whose gradient comes back from `Added` as that of D ⊙ x."""

    @staticmethod
    def forward(ctx, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor, softplus: bool):
        from .discretise_kernel import forward

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, dt, A, bias, D)
        ctx.softplus = softplus
        return *forward(x, dt, A, bias, softplus), x.view_as(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dv: Tensor | None, dg: Tensor | None, do: Tensor | None):
        from .discretise_kernel import backward_beside

        x, dt, A, bias, D = ctx.saved_tensors
        dv, do = (torch.zeros_like(x) if t is None else t for t in (dv, do))
        dg = torch.zeros_like(dt, dtype=torch.float32) if dg is None else dg
        return *backward_beside(dv, dg, do, x, dt, A, bias, D, ctx.softplus), None


class Added(torch.autograd.Function):
    """``y + D ⊙ x``. x gets the output's gradient as it is: what `_Beside` makes of it."""

    @staticmethod
    def forward(ctx, y: Tensor, x: Tensor, D: Tensor) -> Tensor:
        from .skip_kernel import forward

        ctx.dtypes = y.dtype, x.dtype
        return forward(y, x, D)

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor) -> tuple[Tensor, Tensor, None]:
        return do.to(ctx.dtypes[0]), do.to(ctx.dtypes[1]), None


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


def _discretise(x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """See `discretise`."""
    kernels = kernels_of("discretise", x)
    if kernels is not None:
        return kernels.forward(x, dt, A, bias, softplus)
    v, g = plain_discretise(x, dt, A, bias, softplus)
    return v.contiguous(), g.contiguous()


def _discretise_backward(
    grads: Sequence[Tensor | None], x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool
) -> list[Tensor]:
    """Gradients of x, dt and A, then of the bias where it is given."""
    dv, dg = grads
    dv = torch.zeros_like(x) if dv is None else dv
    dg = torch.zeros_like(dt, dtype=torch.promote_types(x.dtype, torch.float32)) if dg is None else dg
    kernels = kernels_of("discretise", x)
    backward = plain_discretise_backward if kernels is None else kernels.backward
    return [d.contiguous() for d in backward(dv, dg, x, dt, A, bias, softplus) if d is not None]


def _fake(x, dt, A, bias, softplus):
    return x.new_empty(x.shape), dt.new_empty(dt.shape, dtype=torch.promote_types(x.dtype, torch.float32))


discretise_op = Operator("discretise", _discretise, _discretise_backward, _fake, 4)
