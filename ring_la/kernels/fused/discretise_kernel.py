"""Mamba-2's time step: ``Δ = dt + bias``, perhaps through a softplus; ``v = Δ x`` and ``g = Δ A``: one pass each way.

With dΔ = Σ dv x + dg A:  dx = Δ dv,  ddt = dΔ (times the softplus' slope),  dbias = Σ ddt,  dA = Σ dg Δ

A skip D x, one D a head, that is added to the recurrence's output, whose gradient is do, comes back in the same pass:
dx = Δ dv + D do,  dD = Σ do x
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_la.kernels.fused.log_decay_kernel import softplus
from ring_la.kernels.runtime.launch import aligned, launch
from ring_la.kernels.runtime.replayed_function import replayed
from ring_la.kernels.runtime.strided import rows, strides
from ring_la.kernels.sizes import cdiv, power_of_2

ELEMENTS, WARPS = 2048, 4
"""Of a program's tile."""
RUN = 128
"""Tokens of a gradient of A, the bias or D that are summed first."""


def unsupported(x: Tensor) -> str:
    """Why these kernels cannot take a call, or an empty string."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    return "" if 1 <= x.shape[-1] <= 2048 else f"heads of {x.shape[-1]}"


@triton.jit(do_not_specialize=("T", "rows", "sb", "st", "sh"))
def discretise_kernel(
    x, dt, A, bias, dv, dg, do, skip, out, g, T, rows, sb, st, sh, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, BACK: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """BR rows of [B, T, H] of D: v and g, or (BACK) dx, and ddt, dg Δ and (SKIP) do x in ``g [2 or 3, rows]``."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)[None, :]
    live = i < rows
    inside = live[:, None] & (d < D)
    h = i % H
    token = i // H
    at = (token // T * sb + token % T * st + h * sh)[:, None] * UNIT + d
    y = tl.load(x + at, inside, other=0.0).to(tl.float32)
    z = tl.load(dt + i, live, other=0.0).to(tl.float32)
    a = tl.load(A + h, live, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + h, live, other=0.0).to(tl.float32)
    step = softplus(z) if SOFTPLUS else z
    into = i[:, None] * D + d
    if BACK:
        w = tl.load(dv + into, inside, other=0.0).to(tl.float32)
        u = tl.load(dg + i, live, other=0.0).to(tl.float32)
        dx = step[:, None] * w
        if SKIP:
            p = tl.load(do + into, inside, other=0.0).to(tl.float32)
            dx += tl.load(skip + h, live, other=0.0).to(tl.float32)[:, None] * p
            tl.store(g + 2 * rows + i, tl.sum(p * y, 1), live)
        tl.store(out + into, dx.to(out.dtype.element_ty), inside)
        to_step = tl.sum(w * y, 1) + u * a
        if SOFTPLUS:
            to_step *= tl.sigmoid(z)
        tl.store(g + i, to_step, live)
        tl.store(g + rows + i, u * step, live)
    else:
        tl.store(out + into, (step[:, None] * y).to(out.dtype.element_ty), inside)
        tl.store(g + i, step * a, live)


@replayed(8, strided=True)
def _launch(x, dt, A, bias, dv, dg, do, skip, softplus: bool) -> tuple[Tensor, Tensor]:
    x, dt, A = rows(x), aligned(dt), aligned(A)
    bias, dv, dg, do, skip = (None if t is None else aligned(t) for t in (bias, dv, dg, do, skip))
    B, T, H, D = x.shape
    unit, steps = strides(x)
    back, count, block = dv is not None, B * T * H, power_of_2(D)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g = torch.empty(*([2 if do is None else 3] if back else []), B, T, H, device=x.device)
    tall = max(1, ELEMENTS // block)
    if count:
        launch(
            discretise_kernel, (cdiv(count, tall),), x, dt, A, A if bias is None else bias, x if dv is None else dv,
            dt if dg is None else dg, x if do is None else do, A if skip is None else skip, out, g, T, count, *steps,
            H=H, D=D, BR=tall, BD=block, UNIT=unit, BIAS=bias is not None, SOFTPLUS=softplus, BACK=back,
            SKIP=do is not None, num_warps=WARPS, tensors="strided",
        )  # fmt: skip
    return out, g


def forward(x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """(v like x, g ``[B, T, H]`` fp32); see `discretise.discretise`."""
    return _launch(x, dt, A, bias, None, None, None, None, softplus)


def backward(
    dv: Tensor, dg: Tensor, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, dt, A and bias."""
    dx, found = by_token(dv, dg, None, x, dt, A, bias, None, softplus)
    return dx, *_sums(found, _by_run(found), dt, A, bias)


def backward_beside(
    dv: Tensor, dg: Tensor, do: Tensor, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor, softplus: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of x, dt, A, bias and D, where ``D [H]`` x is added to the output, whose gradient is `do`."""
    dx, found = by_token(dv, dg, do, x, dt, A, bias, D, softplus)
    sums = _by_run(found)
    return dx, *_sums(found, sums, dt, A, bias), sums[2].sum(0).to(D.dtype)


def by_token(
    dv: Tensor, dg: Tensor, do: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and what each token adds to those of dt and the bias, of A and, where D is given, of D: fp32
    ``[2 or 3, B, T, H]``."""
    return _launch(x, dt, A, bias, dv, dg, do, D, softplus)


def _by_run(found: Tensor) -> Tensor:
    """``[n, B, T, H]`` as rows of the same sums over tokens, perhaps fewer: one reduction of all of them to few columns
    keeps little of a GPU busy."""
    n, B, T, H = found.shape
    rest = (B * T) % RUN
    return found.view(n, B * T, H) if rest else found.view(n, -1, RUN, H).sum(2)


def _sums(
    found: Tensor, sums: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of dt, A and bias."""
    dbias = None if bias is None else sums[0].sum(0).to(bias.dtype)
    return found[0].to(dt.dtype), sums[1].sum(0).to(A.dtype), dbias
