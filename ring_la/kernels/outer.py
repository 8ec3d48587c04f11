"""Linear attention without a direction on one rank: what the tokens of a piece add up to, and what they read.

    ring_la::outer_sum    S_n = Σ_t k_t v_tᵀ over the tokens of piece n, fp32 (fp64 for fp64)
    ring_la::read_state   o_t = scale · S_nᵀ q_t, or S_n q_t

They are each other's gradients. On CUDA registered operators, by Triton where it can; elsewhere PyTorch's own
operations, which have derivatives of every order. Heads of v or S may be a multiple of those of k or q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import triton_installed
from .chunking import Chunks
from .local import Inputs
from .operator import Operator

CHUNK = 64


def outer_sum(k: Tensor, v: Tensor, cu: Tensor | None) -> Tensor:
    """``[B, N, H, K, V]`` of ``k [B, T, Hk, K]`` and ``v [B, T, H, V]``; `cu` ``[N+1]`` holds the pieces' offsets."""
    return outer_sum_op(k, v, cu) if k.is_cuda else plain_outer_sum(k, v, cu)


def read_state(q: Tensor, S: Tensor, cu: Tensor | None, scale: float) -> Tensor:
    """``o [B, T, H, V]`` in q's dtype, of ``q [B, T, Hq, K]`` and its piece's state, ``S [B, N, H, K, V]``."""
    return read_state_op(q, S, cu, scale, False) if q.is_cuda else plain_read_state(q, S, cu, scale, False)


# -- in PyTorch ----------------------------------------------------------------------------------------------


def plain_outer_sum(k: Tensor, v: Tensor, cu: Tensor | None) -> Tensor:
    wide = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    k, v = _repeated(k, v.shape[2]).to(wide), v.to(wide)
    if cu is None:
        return (k.permute(0, 2, 3, 1) @ v.transpose(1, 2))[:, None]
    chunks = Chunks(k.shape[1], CHUNK, cu, device=k.device)
    parts = chunks.split(k).mT @ chunks.split(v)  # [B, chunks, H, K, V]
    sums = parts.new_zeros(k.shape[0], chunks.pieces + 1, *parts.shape[2:]).index_add(1, chunks.piece, parts)
    return sums[:, : chunks.pieces]  # the last took the unused chunks


def plain_read_state(q: Tensor, S: Tensor, cu: Tensor | None, scale: float, transposed: bool) -> Tensor:
    S = scale * (S.mT if transposed else S)
    q = _repeated(q, S.shape[2])
    if cu is None:
        return (q.transpose(1, 2) @ S[:, 0].to(q.dtype)).transpose(1, 2)
    chunks = Chunks(q.shape[1], CHUNK, cu, device=q.device)
    return chunks.merge(chunks.split(q) @ S.index_select(1, chunks.known).to(q.dtype))


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


# -- the operators -------------------------------------------------------------------------------------------


def _outer_sum(k: Tensor, v: Tensor, cu: Tensor | None) -> Tensor:
    return _scaled_sum(k, v, cu, 1.0)


def _scaled_sum(k: Tensor, v: Tensor, cu: Tensor | None, scale: float) -> Tensor:
    if k.is_cuda and triton_installed():
        from .triton.again import again
        from .triton.local import unsupported
        from .triton.read import RULE, total

        if not unsupported(RULE, Inputs(k, k, v)):
            return again(total, (k, v, None if cu is None else cu.to(torch.int32)), scale)
    return (scale * plain_outer_sum(k, v, cu)).contiguous()


def _read_state(q: Tensor, S: Tensor, cu: Tensor | None, scale: float, transposed: bool) -> Tensor:
    if q.is_cuda and triton_installed():
        from .triton.again import again
        from .triton.read import read, unsupported

        if not unsupported(q, S):
            return again(read, (q, S, None if cu is None else cu.to(torch.int32)), scale, transposed)
    return plain_read_state(q, S, cu, scale, transposed).contiguous()


def _outer_sum_backward(dS: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> list[Tensor]:
    """Gradients of k and v."""
    return [_own(_read_state(v, dS, cu, 1.0, True), k), _read_state(k, dS, cu, 1.0, False).to(v.dtype)]


def _read_state_backward(
    do: Tensor, q: Tensor, S: Tensor, cu: Tensor | None, scale: float, transposed: bool
) -> list[Tensor]:
    """Gradients of q and S."""
    dq = _own(_read_state(do, S, cu, scale, not transposed), q)
    dS = _scaled_sum(q, do, cu, scale)
    return [dq, (dS.mT.contiguous() if transposed else dS).to(S.dtype)]


def _own(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient of all heads, summed over those that x's heads serve."""
    if grad.shape[2] != x.shape[2]:
        grad = grad.unflatten(2, (x.shape[2], -1)).sum(3, dtype=torch.promote_types(x.dtype, torch.float32))
    return grad.to(x.dtype)


def _fake_outer_sum(k, v, cu):
    wide = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    pieces = 1 if cu is None else cu.shape[0] - 1
    return k.new_empty((k.shape[0], pieces, v.shape[2], k.shape[3], v.shape[3]), dtype=wide)


def _fake_read_state(q, S, cu, scale, transposed):
    return q.new_empty((*q.shape[:2], S.shape[2], S.shape[3 if transposed else 4]))


outer_sum_op = Operator("outer_sum", _outer_sum, _outer_sum_backward, _fake_outer_sum, 2)
read_state_op = Operator("read_state", _read_state, _read_state_backward, _fake_read_state, 2)
