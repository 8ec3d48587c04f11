"""The momentum delta rule by Triton: outputs, and the states behind documents, with gradients.

On one device, or of a run of a rank's tokens. In an eager call alone: what traces one sees the PyTorch of
`recurrences.momentum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd import first_derivative_only, traced
from ..choice import triton_installed

NARROW, WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16, torch.float16)
SIZES = range(33, 129)
"""Head sizes: of narrower tiles, and of fp32, ptxas 12.8 makes kernels that read registers which nothing wrote."""


def unsupported(tokens: Sequence[Tensor]) -> str:
    """Why there are no kernels for q, k, v, p, g, mu, beta and eta of a call, or an empty string: the same on all
    ranks, which may have no tokens."""
    q, k, v, p, *gates = tokens
    if not (q.is_cuda and triton_installed()) or traced(q):
        return "no eager call on a CUDA device with Triton"
    if len({x.dtype for x in (q, k, v, p)}) > 1 or q.dtype not in NARROW or any(x.dtype not in WIDE for x in gates):
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}, {p.dtype}: the kernels take bf16 or fp16, one for q, k, v, p"
    if q.shape[3] not in SIZES or v.shape[3] not in SIZES:
        return f"head sizes {q.shape[3]} and {v.shape[3]}: the kernels take {SIZES[0]} to {SIZES[-1]}"
    return "" if v.shape[0] * v.shape[2] else "no rows or no heads"


def chunks(
    tokens: Sequence[Tensor], states: tuple[Tensor, Tensor] | None, cu: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(o ``[B, T, H, V]`` like v, S and M ``[N, H, K, V]`` in fp32 behind documents).

    Args:
        tokens: q, k ``[B, T, H, K]``, v ``[B, T, H, V]``, p like k, g, mu, beta, eta ``[B, T, H]``.
        states: S and M before documents, ``[N, H, K, V]`` in fp32; None: zeros.
        cu: offsets of the documents of a row, N + 1; (0, T) where B is not 1, and N is B.
    """
    S, M = (None, None) if states is None else states
    return _Chunks.apply(*tokens, S, M, tuple(cu), scale)


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any):
        from ..runtime.launch import aligned
        from .after import outputs
        from .before import before_forwards
        from .launches import ChunksCall, Given, KeptMomentum
        from .squares import squares_of
        from .walks import forwards

        *tokens, S, M, cu, scale = given
        x = Given(*(aligned(t) for t in tokens))
        S, M = (None if t is None else aligned(t.float()) for t in (S, M))
        (B, T, H, K), V = x.q.shape, x.v.shape[3]
        call = ChunksCall(B, T, H, K, V, cu, scale, x.q.dtype, x.q.device)
        squares, rates = squares_of(call, x)
        parts = before_forwards(call, x, squares, rates)
        w, before, ends = forwards(call, x.k, parts, rates, S, M)
        kept = KeptMomentum(squares, rates, w, *before)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*x, *kept)
        ctx.call = call
        return outputs(call, x, kept), *ends

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None, dM: Tensor | None):
        from ..runtime.launch import aligned
        from .before import before_backwards
        from .gates import gates
        from .gradients import reads, room, writes
        from .launches import Given, KeptMomentum
        from .walks import backwards

        call, saved = ctx.call, ctx.saved_tensors
        x, kept = Given(*saved[:8]), KeptMomentum(*saved[8:])
        do = torch.zeros_like(x.v) if do is None else aligned(do)
        if dS is not None or dM is not None:
            dS, dM = (room if t is None else aligned(t.float()) for t, room in zip((dS, dM), call.states()))
        parts = before_backwards(call, x, do, kept.squares, kept.rates)
        dv, behind, starts = backwards(call, x, do, parts, kept.rates, dS, dM)
        sums = room(call)
        dq, dp = reads(call, x, kept, do, dv, sums)
        dk, deta = writes(call, x, kept, do, dv, behind, sums)
        numbers = [*gates(call, x, kept, do, dv, behind, sums), deta]
        found = [d.to(t.dtype) for d, t in zip(numbers, x[4:])]
        first = [d if wanted else None for d, wanted in zip(starts, ctx.needs_input_grad[8:10])]
        return dq, dk, dv.to(x.v.dtype), dp, *found, *first, None, None
