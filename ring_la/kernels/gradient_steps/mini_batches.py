"""Whole mini-batches of TTT-Linear on one device, by Triton: outputs, and the model behind them, with gradients.

In an eager call alone: what traces one sees the PyTorch of `recurrences.ttt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd import first_derivative_only, traced
from ..choice import triton_installed

NARROW, WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 128


def unsupported(
    given: Sequence[Tensor], size: int, scale: float
) -> str:  # fmt: skip
    """Why there are no kernels for q, k, v, η, w and b of a call, or an empty string."""
    q, k, v, eta, w, b = given
    if not (q.is_cuda and triton_installed()) or traced(q):
        return "no eager call on a CUDA device with Triton"
    one = len({x.dtype for x in (q, k, v)}) == 1
    if not one or q.dtype not in NARROW or any(x.dtype not in WIDE for x in (eta, w, b)):
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: the kernels take bf16 or fp16, one for q, k and v"
    if q.shape[3] > WIDEST:
        return f"head size {q.shape[3]}: the kernels take at most {WIDEST}"
    if not scale:
        return "scale 0"
    from .launches import MINI_BATCHES

    return "" if size in MINI_BATCHES else f"mini-batches of {size}: the kernels take {MINI_BATCHES}"


def mini_batches(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor, W: Tensor | None, c: Tensor | None,
    size: int, scale: float, eps: float, norm: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o like q, W ``[B, H, K, K]`` and c ``[B, H, K]`` in fp32 behind the tokens); not `norm`: z in fp32 for o.

    Args:
        q, k, v: ``[B, T, H, K]``, T a multiple of size. eta: ``[B, T, H]``. w, b: ``[H, K]``.
        W, c: fp32, as tokens begin; None: zeros.
    """
    return _MiniBatches.apply(q, k, v, eta, w, b, W, c, size, scale, eps, norm)


class _MiniBatches(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor, W: Tensor | None,
        c: Tensor | None, size: int, scale: float, eps: float, norm: bool,
    ):  # fmt: skip
        from ..runtime.launch import aligned
        from .chunks import outputs
        from .launches import StepsCall
        from .walks import forwards

        q, k, v, eta, w, b = (aligned(x) for x in (q, k, v, eta, w, b))
        W, c = (None if x is None else aligned(x.float()) for x in (W, c))
        B, T, H, K = q.shape
        call = StepsCall(B, T, H, K, size, scale, eps, q.dtype)
        kept, W_end, c_end = forwards(call, k, v, eta, w, b, W, c)
        o = outputs(call, q, k, eta, w, b, kept, norm)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, eta, w, b, *kept)
        ctx.call, ctx.norm = call, norm
        return o, W_end, c_end

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor | None, dW: Tensor | None, dc: Tensor | None):
        from ..runtime.launch import aligned
        from .chunks import gradients, prepare
        from .launches import KeptSteps
        from .walks import backwards

        q, k, v, eta, w, b, *kept = ctx.saved_tensors
        call, kept = ctx.call, KeptSteps(*kept)
        do = torch.zeros_like(q) if do is None else do
        if dW is not None or dc is not None:
            dW = q.new_zeros(call.B, call.H, call.K, call.K, dtype=call.wide) if dW is None else aligned(dW.float())
            dc = q.new_zeros(call.B, call.H, call.K, dtype=call.wide) if dc is None else aligned(dc.float())
        prepared, dw, db = prepare(call, (q, k, v, eta, w, b), aligned(do), kept, ctx.norm)
        *walked, dW0, dc0 = backwards(call, q, k, eta, w, kept.d, prepared, dW, dc)
        dq, dk, dv, deta, *more = gradients(call, (q, k, v, eta, w, b), kept, prepared, tuple(walked))
        shared = [(x + y).unflatten(0, (call.B, call.H)).sum((0, 2)) for x, y in zip((dw, db), more)]
        first = [x if wanted else None for x, wanted in zip((dW0, dc0), ctx.needs_input_grad[6:8])]
        return dq, dk, dv, deta.to(eta.dtype), shared[0].to(w.dtype), shared[1].to(b.dtype), *first, *[None] * 4
