"""TTT-Linear's tokens on one device, by Triton (`ttt_kernel`): outputs, and the model behind them.

In an eager call alone: what traces one sees the PyTorch of `recurrences.ttt`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...autograd import first_derivative_only, traced, wanting
from ..choice import triton_installed


def why_not(*tensors: Tensor, size: int) -> str:
    """Why there is no kernel for q, k, v and the others of a call, or an empty string."""
    if not (tensors[0].is_cuda and triton_installed()) or traced(tensors[0]):
        return "no eager call on a CUDA device with Triton"
    from .ttt_kernel import unsupported

    return unsupported(*tensors, size=size)


def mini_batches(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor, W: Tensor | None, c: Tensor | None,
    size: int, scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o like v, W ``[B, H, K, K]`` and c ``[B, H, K]`` in fp32 behind the last whole mini-batch).

    Args:
        q, k, v: ``[B, T, H, K]``. eta: ``[B, T, H]``. w, b: ``[H, K]``. W, c: fp32, as tokens begin; None: zeros.
    """
    given = q, k, v, eta, w, b, W, c
    return _MiniBatches.apply(*given, size, scale, eps, wanting(*given))


class _MiniBatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, eta, w, b, W, c, size: int, scale: float, eps: float, keep: bool):
        from .ttt_kernel import forward

        o, W_end, c_end, Ws, cs = forward(q, k, v, eta, w, b, W, c, size, scale, eps, keep)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, eta, w, b, Ws, cs)
        ctx.how = size, scale, eps
        return o, W_end, c_end

    @staticmethod
    @first_derivative_only
    def backward(ctx, do: Tensor | None, dW: Tensor | None, dc: Tensor | None):
        from .ttt_kernel import backward

        q, k, v, eta, w, b, Ws, cs = ctx.saved_tensors
        do = torch.zeros_like(v) if do is None else do
        if dW is not None or dc is not None:
            dW = Ws.new_zeros(Ws[:, :, 0].shape) if dW is None else dW
            dc = cs.new_zeros(cs[:, :, 0].shape) if dc is None else dc
        dq, dk, dv, deta, dw, db, dW0, dc0 = backward(do, dW, dc, q, k, v, eta, w, b, Ws, cs, *ctx.how)
        own = deta.to(eta.dtype), dw.sum(0).to(w.dtype), db.sum(0).to(b.dtype)
        W, c = (x if wanted else None for x, wanted in zip((dW0, dc0), ctx.needs_input_grad[6:8]))
        return dq, dk, dv, *own, W, c, *[None] * 4
