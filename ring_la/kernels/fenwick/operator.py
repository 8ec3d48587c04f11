"""Log-linear attention of runs of tokens on one device, by its kernels, as a registered operator.

ring_la::log_linear   ring_la::log_linear_backward
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..choice import triton_installed
from ..fused.operator import Operator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 128


def unsupported(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor) -> str:
    """Why the kernels cannot take a call, or an empty string."""
    if not v.is_cuda or not triton_installed():
        return "tensors are not on a CUDA device, or triton is not installed"
    if len({x.dtype for x in (q, k, v)}) > 1 or any(x.dtype not in DTYPES for x in (v, g, lam)):
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: the kernels take fp32, bf16 or fp16, one for q, k and v"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"head sizes {q.shape[3]} and {v.shape[3]}: the kernels take at most {WIDEST}"
    if v.shape[0] * v.shape[2] > 65535:
        return f"{v.shape[0] * v.shape[2]} rows and heads: the kernels take at most 65535"
    return "no tokens" if v.numel() == 0 else ""


def log_linear(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, runs: Sequence[int], scale: float
) -> Tensor:  # fmt: skip
    """o ``[B, T, H, V]`` in v's dtype.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, H, V]``, of one dtype with them. g: ``[B, T, H]``. lam: ``[B, T, H, L]``.
        runs: of consecutive tokens of a document each, which together are all tokens, in order: start, stop, and the
            position of the start in its document. Tokens of a run see those of it alone.
    """
    return log_linear_op(q, k, v, g, lam, runs, scale)[0]


def _log_linear(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, runs: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the nodes' states, and the running sum of g, ``[B, H, T]`` in fp64: only its differences are read."""
    from .launches import LevelsCall
    from .outputs import outputs
    from .states import states

    q, k, v, lam = (_plain(x) for x in (q, k, v, lam))
    call = LevelsCall.of(q, v, lam, runs, scale)
    c = torch.empty(call.B, call.H, call.T, dtype=torch.float64, device=v.device).copy_(g.detach().mT).cumsum(-1)
    S = states(call, k, v, c, lam, readers=False)
    return outputs(call, q, k, v, c, lam, S), S, c


def _log_linear_backward(
    grads: Sequence[Tensor | None], q: Tensor, k: Tensor, v: Tensor, g: Tensor, lam: Tensor, runs: Sequence[int],
    scale: float, S: Tensor, c: Tensor,
) -> list[Tensor]:  # fmt: skip
    from .gradients import gradients
    from .launches import LevelsCall
    from .states import states

    if grads[0] is None:
        return [torch.zeros_like(x) for x in (q, k, v, g, lam)]
    do, (q, k, v, lam) = _plain(grads[0].to(v.dtype)), (_plain(x) for x in (q, k, v, lam))
    call = LevelsCall.of(q, v, lam, runs, scale)
    adjoint = states(call, q, do, c, lam, readers=True)
    dq, dk, dv, dg, dlam = gradients(call, (q, k, v, do), c, lam, S, adjoint)
    if q.shape[2] != call.H:
        dq, dk = (d.unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype) for d in (dq, dk))
    return [dq, dk, dv, dg.to(g.dtype), dlam.to(lam.dtype)]


def _plain(x: Tensor) -> Tensor:
    """`x` as kernels take it."""
    from ..runtime.launch import aligned

    return aligned(x)


def _fake(q, k, v, g, lam, runs, scale):
    from .launches import CHUNK
    from .table import table_of

    (B, T, H, V), K = v.shape, q.shape[3]
    rows = table_of(tuple(runs), CHUNK[v.dtype], torch.device("cpu"))[0].shape[0]
    states = v.new_empty((B, rows, H, K, V))
    return v.new_empty(v.shape), states, v.new_empty((B, H, T), dtype=torch.float64)


log_linear_op = Operator("log_linear", _log_linear, _log_linear_backward, _fake, 5, keeps=(1, 2))
