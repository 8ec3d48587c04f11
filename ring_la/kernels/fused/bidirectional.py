"""Linear attention without a direction on one rank: what the tokens of a piece add up to, and what they read.

    ring_la::outer_sum      S_n = Σ_t k_t v_tᵀ over the tokens of piece n, fp32 (fp64 for fp64)
    ring_la::read_state     o_t = scale · S_nᵀ q_t, or S_n q_t
    ring_la::sum_and_read   both, where nothing comes between
    ring_la::read_quotient  o_t over scale · n_nᵀ q'_t + eps, of states with n as their last column

The first two are each other's gradients. On CUDA registered operators, by Triton where it can; elsewhere PyTorch's own
operations, which have derivatives of every order. Heads of v or S may be a multiple of those of k or q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pytorch.chunks import Chunks
from .operator import Operator, kernels_of

CHUNK = 64


def outer_sum(k: Tensor, v: Tensor, cu: Tensor | None) -> Tensor:
    """``[B, N, H, K, V]`` of ``k [B, T, Hk, K]`` and ``v [B, T, H, V]``; `cu` ``[N+1]`` holds the pieces' offsets."""
    return outer_sum_op(k, v, cu) if k.is_cuda else plain_outer_sum(k, v, cu)


def read_state(q: Tensor, S: Tensor, cu: Tensor | None, scale: float) -> Tensor:
    """``o [B, T, H, V]`` in q's dtype, of ``q [B, T, Hq, K]`` and its piece's state, ``S [B, N, H, K, V]``."""
    return read_state_op(q, S, cu, scale, False) if q.is_cuda else plain_read_state(q, S, cu, scale, False)


def read_quotient(q: Tensor, own: Tensor | None, S: Tensor, cu: Tensor | None, scale: float, eps: float) -> Tensor:
    """``scale · Sᵀ q / (scale · nᵀ q' + eps)`` ``[B, T, H, V]`` in q's dtype, of ``q [B, T, Hq, K]``, ``own`` q' like
    it (None: q) and its piece's state and n, ``[B, N, H, K, V+1]``: divided before it is rounded."""
    if q.is_cuda:
        return read_quotient_op(q, own, S, cu, scale, eps)
    return plain_read_quotient(q, own, S, cu, scale, eps)


def sum_and_read(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor | None, cu: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """What the tokens read of what they add up to, and that ``[B, N, H, K, V]``; `S` of its dtype is added to it."""
    if q.is_cuda:
        return sum_and_read_op(q, k, v, S, cu, scale)
    return _sum_then_read(q, k, v, S, cu, StepConstants(PLAIN, scale))  # type: ignore[return-value]


# -- in PyTorch ----------------------------------------------------------------------------------------------


def plain_outer_sum(k: Tensor, v: Tensor, cu: Tensor | None, scale: float = 1.0, S: Tensor | None = None) -> Tensor:
    """``scale · Σ k vᵀ + S``."""
    wide = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    k, v = scale * _repeated(k, v.shape[2]).to(wide), v.to(wide)
    if cu is None:
        sums = (k.permute(0, 2, 3, 1) @ v.transpose(1, 2))[:, None]
        return sums if S is None else sums + S
    chunks = Chunks(k.shape[1], CHUNK, cu, device=k.device)
    parts = chunks.split(k).mT @ chunks.split(v)  # [B, chunks, H, K, V]
    sums = parts.new_zeros(k.shape[0], chunks.pieces + 1, *parts.shape[2:]).index_add(1, chunks.piece, parts)
    sums = sums[:, : chunks.pieces]  # the last took the unused chunks
    return sums if S is None else sums + S


def plain_read_state(q: Tensor, S: Tensor, cu: Tensor | None, scale: float, transposed: bool) -> Tensor:
    S = scale * (S.mT if transposed else S)
    q = _repeated(q, S.shape[2])
    if cu is None:
        return (q.transpose(1, 2) @ S[:, 0].to(q.dtype)).transpose(1, 2)
    chunks = Chunks(q.shape[1], CHUNK, cu, device=q.device)
    return chunks.merge(chunks.split(q) @ S.index_select(1, chunks.known).to(q.dtype))


def plain_read_quotient(
    q: Tensor, own: Tensor | None, S: Tensor, cu: Tensor | None, scale: float, eps: float
) -> Tensor:
    """By two reads, which have derivatives."""
    wide = q.to(S.dtype)
    if own is None:
        both = read_state(wide, S, cu, scale)
        above, below = both[..., :-1], both[..., -1:]
    else:
        above = read_state(wide, S[..., :-1].contiguous(), cu, scale)
        below = read_state(own.to(S.dtype), S[..., -1:].contiguous(), cu, scale)
    return (above / (below + eps)).to(q.dtype)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


class Primitives(NamedTuple):
    """What computes the steps below: ``total(k, v, cu, scale, S)`` is ``scale · Σ k vᵀ + S``, ``read(x, S, cu, scale,
    transposed)`` what tokens read."""

    total: Callable[..., Tensor]
    read: Callable[..., Tensor]


PLAIN = Primitives(plain_outer_sum, plain_read_state)


class StepConstants(NamedTuple):
    """What the steps below have in common: what computes them, the scale, and whether it is ``S q`` that is read."""

    by: Primitives
    scale: float = 1.0
    transposed: bool = False


def _sum(k: Tensor, v: Tensor, cu: Tensor | None, step: StepConstants) -> Tensor:
    return step.by.total(k, v, cu, 1.0, None)


def _sum_back(dS: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, step: StepConstants) -> tuple[Tensor, ...]:
    by = step.by
    return _own(by.read(v, dS, cu, 1.0, True), k), by.read(k, dS, cu, 1.0, False).to(v.dtype)


def _read(q: Tensor, S: Tensor, cu: Tensor | None, step: StepConstants) -> Tensor:
    return step.by.read(q, S, cu, step.scale, step.transposed)


def _read_back(do: Tensor, q: Tensor, S: Tensor, cu: Tensor | None, step: StepConstants) -> tuple[Tensor, ...]:
    by, scale, transposed = step
    dS = by.total(q, do, cu, scale, None)
    dS = (dS.mT.contiguous() if transposed else dS).to(S.dtype)
    return _own(by.read(do, S, cu, scale, not transposed), q), dS


def _sum_then_read(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor | None, cu: Tensor | None, step: StepConstants
) -> tuple[Tensor, ...]:
    S = step.by.total(k, v, cu, 1.0, S)
    return step.by.read(q, S, cu, step.scale, False), S


def _sum_then_read_back(
    do: Tensor, dS: Tensor | None, q: Tensor, k: Tensor, v: Tensor, S: Tensor, cu: Tensor | None, step: StepConstants
) -> tuple[Tensor, ...]:
    dS = step.by.total(q, do, cu, step.scale, dS)
    return _own(step.by.read(do, S, cu, step.scale, True), q), *_sum_back(dS, k, v, cu, step), dS


def _own(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient of all heads, summed over those that x's heads serve."""
    if grad.shape[2] != x.shape[2]:
        grad = grad.unflatten(2, (x.shape[2], -1)).sum(3, dtype=torch.promote_types(x.dtype, torch.float32))
    return grad.to(x.dtype)


# -- the operators -------------------------------------------------------------------------------------------


def _run(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], scale: float = 1.0, transposed: bool = False
) -> Any:
    """A step by Triton where it can, else by PyTorch."""
    kernels = kernels_of("bidirectional", *tensors)
    if kernels is not None:
        from ..runtime.replayed_function import replayed_call

        return replayed_call(
            function, tensors, StepConstants(Primitives(kernels.total, kernels.read), scale, transposed)
        )
    out = function(*tensors, StepConstants(PLAIN, scale, transposed))
    return out.contiguous() if isinstance(out, Tensor) else tuple(x.contiguous() for x in out)


def _outer_sum(k: Tensor, v: Tensor, cu: Tensor | None) -> Tensor:
    return _run(_sum, (k, v, cu))


def _outer_sum_backward(dS: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> list[Tensor]:
    """Gradients of k and v."""
    return [*_run(_sum_back, (dS, k, v, cu))]


def _read_state(q: Tensor, S: Tensor, cu: Tensor | None, scale: float, transposed: bool) -> Tensor:
    return _run(_read, (q, S, cu), scale, transposed)


def _read_state_backward(
    do: Tensor, q: Tensor, S: Tensor, cu: Tensor | None, scale: float, transposed: bool
) -> list[Tensor]:
    """Gradients of q and S."""
    return [*_run(_read_back, (do, q, S, cu), scale, transposed)]


def _sum_and_read(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor | None, cu: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    o, S = _run(_sum_then_read, (q, k, v, S, cu), scale)
    return o, S


def _sum_and_read_backward(
    grads: Sequence[Tensor | None], q: Tensor, k: Tensor, v: Tensor, S: Tensor | None, cu: Tensor | None, scale: float,
    whole: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and S; `whole` is what was read."""
    do, dS = grads
    do = torch.zeros_like(v, dtype=q.dtype) if do is None else do
    dq, dk, dv, entering = _run(_sum_then_read_back, (do, dS, q, k, v, whole, cu), scale)
    return [dq, dk, dv] if S is None else [dq, dk, dv, entering]


def _read_quotient(q: Tensor, own: Tensor | None, S: Tensor, cu: Tensor | None, scale: float, eps: float) -> Tensor:
    kernels = kernels_of("bidirectional", q, own, S)
    if kernels is None:
        return plain_read_quotient(q, own, S, cu, scale, eps).contiguous()
    from ..runtime.replayed_function import replayed_call

    return replayed_call(kernels.quotient, (q, own, S, cu), scale, eps)


def _read_quotient_backward(
    do: Tensor, q: Tensor, own: Tensor | None, S: Tensor, cu: Tensor | None, scale: float, eps: float
) -> list[Tensor]:
    """Gradients of q, q' (if given) and S: those of two reads, above and below the line."""
    kernels = kernels_of("bidirectional", q, own, S)
    step = StepConstants(PLAIN if kernels is None else Primitives(kernels.total, kernels.read), scale)
    wide = q.to(S.dtype)
    narrow, states, keys = wide if own is None else own.to(S.dtype), S[..., :-1].contiguous(), S[..., -1:].contiguous()
    below = _read(narrow, keys, cu, step) + eps
    d_above = (do / below).contiguous()
    d_below = -(d_above * _read(wide, states, cu, step)).sum(-1, keepdim=True) / below
    (dq, dS), (d_own, d_keys) = _read_back(d_above, wide, states, cu, step), _read_back(d_below, narrow, keys, cu, step)
    of_tokens = [dq + d_own] if own is None else [dq, d_own]
    return [*[x.to(q.dtype) for x in of_tokens], torch.cat([dS, d_keys], -1)]


def _fake_outer_sum(k, v, cu):
    wide = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    pieces = 1 if cu is None else cu.shape[0] - 1
    return k.new_empty((k.shape[0], pieces, v.shape[2], k.shape[3], v.shape[3]), dtype=wide)


def _fake_read_state(q, S, cu, scale, transposed):
    return q.new_empty((*q.shape[:2], S.shape[2], S.shape[3 if transposed else 4]))


def _fake_read_quotient(q, own, S, cu, scale, eps):
    return q.new_empty((*q.shape[:2], S.shape[2], S.shape[4] - 1))


def _fake_sum_and_read(q, k, v, S, cu, scale):
    return q.new_empty((*q.shape[:2], *v.shape[2:])), _fake_outer_sum(k, v, cu)


outer_sum_op = Operator("outer_sum", _outer_sum, _outer_sum_backward, _fake_outer_sum, 2)
read_state_op = Operator("read_state", _read_state, _read_state_backward, _fake_read_state, 2)
sum_and_read_op = Operator("sum_and_read", _sum_and_read, _sum_and_read_backward, _fake_sum_and_read, 4, keeps=(1,))
read_quotient_op = Operator("read_quotient", _read_quotient, _read_quotient_backward, _fake_read_quotient, 3)
