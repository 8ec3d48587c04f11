"""Keys scaled by how much their channels have been written, in one pass over the tokens of one device.

    ring_la::precondition   ring_la::precondition_backward

    A ← e^h A + α k²,        k̂ = k ⊙ base^(−r / (1 + |r|)),  r = log(A + ε) − center

On CUDA, where Triton can take it; the recurrence that has it goes by its parts elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .operator import Operator, kernels_of

CHUNK = 64
"""Tokens a tile of the kernels."""


def can_precondition(k: Tensor, *others: Tensor) -> bool:
    """Whether there is a kernel for keys like k, and other tensors like these."""
    return kernels_of("precondition", k, *others) is not None


def precondition(
    k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, A: Tensor | None, cu: Tensor | None, base: float, eps: float
) -> tuple[Tensor, Tensor]:
    """(k̂ ``[B, T, H, K]`` in k's dtype, A after each document ``[N, H, K]`` fp32).

    Args:
        k: ``[B, T, Hk, K]``. h: log-decay, alpha: weight ``[B, T, H]``. center: ``[H]``.
        A: before each document ``[N, H, K]``; None: zero. cu: offsets ``[N+1]`` of documents in one row; None: N is B.
    """
    written, final, _ = precondition_op(k, h, alpha, center, A, cu, math.log(base), eps)
    return written, final


def _precondition(
    k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, A: Tensor | None, cu: Tensor | None, rate: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """k̂, A after each document, and A before each tile of tokens."""
    from .precondition_kernel import forward

    written, final, starts = forward(k, h, alpha, center, A, cu, rate, eps, CHUNK)
    return written, final, starts


def _precondition_backward(
    grads: Sequence[Tensor | None], k: Tensor, h: Tensor, alpha: Tensor, center: Tensor, A: Tensor | None,
    cu: Tensor | None, rate: float, eps: float, starts: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of k, h, alpha and center, then of A where it is given."""
    from .precondition_kernel import backward

    dwritten, dfinal, _ = grads
    like = (*k.shape[:2], h.shape[2], k.shape[3])
    dwritten = k.new_zeros(like) if dwritten is None else dwritten
    dk, dh, dalpha, dcenter, dA = backward(dwritten, dfinal, k, h, alpha, center, starts, cu, rate, eps, CHUNK)
    out = [dk, dh.to(h.dtype), dalpha.to(alpha.dtype), dcenter.to(center.dtype)]
    return out if A is None else [*out, dA.to(A.dtype)]


def _fake(k, h, alpha, center, A, cu, rate, eps):
    (B, T, _, K), H = k.shape, h.shape[2]
    documents = B if cu is None else cu.shape[0] - 1
    tiles = B * ((T + CHUNK - 1) // CHUNK) if cu is None else T // CHUNK + documents
    wide = torch.float32
    return (
        k.new_empty((B, T, H, K)),
        k.new_empty((documents, H, K), dtype=wide),
        k.new_empty((tiles, H, K), dtype=wide),
    )


precondition_op = Operator("precondition", _precondition, _precondition_backward, _fake, 5, keeps=(2,))
