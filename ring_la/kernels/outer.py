"""The sum of outer products of all tokens, ``Σ_t k_t v_tᵀ``, in fp32 from tensors of any precision.

    ring_la::outer_sum   ring_la::outer_sum_backward

On CUDA a registered operator, one product of matrices with an fp32 result; elsewhere PyTorch's own operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SecondDerivativeError


def outer_sum(k: Tensor, v: Tensor) -> Tensor:
    """``[B, H, K, V]``, fp32 (fp64 for fp64), of ``k [B, H, T, K]`` and ``v [B, H, T, V]`` of one dtype."""
    if k.is_cuda and k.dtype in (torch.bfloat16, torch.float16):
        return outer_sum_op(k, v)
    wide = torch.promote_types(k.dtype, torch.float32)
    return k.to(wide).mT @ v.to(wide)


@torch.library.custom_op("ring_la::outer_sum", mutates_args=())
def outer_sum_op(k: Tensor, v: Tensor) -> Tensor:
    if not k.is_cuda:
        return k.float().mT @ v.float()
    B, H, _, K = k.shape
    S = torch.bmm(k.reshape(B * H, -1, K).mT, v.reshape(B * H, -1, v.shape[3]), out_dtype=torch.float32)
    return S.view(B, H, K, -1)


@outer_sum_op.register_fake
def _(k, v):
    return k.new_empty((*k.shape[:2], k.shape[3], v.shape[3]), dtype=torch.float32)


@torch.library.custom_op("ring_la::outer_sum_backward", mutates_args=())
def outer_sum_backward(dS: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dS = dS.to(k.dtype)
    return v @ dS.mT, k @ dS


@outer_sum_backward.register_fake
def _(dS, k, v):
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, dS: Tensor):
    return outer_sum_backward(dS, *ctx.saved_tensors)


def _refuse(ctx, *grads):
    raise SecondDerivativeError(
        "on CUDA ring_la's linear attention has exact first derivatives only; a second derivative was asked for "
        "(create_graph=True and a backward through it)"
    )


outer_sum_op.register_autograd(_backward, setup_context=_setup)
outer_sum_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)
