"""What a delta rule's tokens bring, of what projections give: q and k of unit length, log-decays, rates.

    ring_la::prepare   ring_la::prepare_backward

On CUDA a registered operator, by one Triton kernel each way where it can; elsewhere PyTorch's own operations, which
have derivatives of every order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .log_decay import plain_log_decay, plain_log_decay_backward
from .operator import Operator, fused, kernels_of
from .unit_length import plain_unit_length, plain_unit_length_backward

TOGETHER = False
"""Whether layers prepare by one kernel, rather than one each for q, k, g and β. Right on an H200; its first
form, gates last, was 1 to 4 % slower there, the present one is not measured."""

EPS = 1e-6
"""As in `unit_length.l2norm`."""


def prepare(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    most: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q and k of unit length, log-decays g, rates β), as `gated_delta_rule` and `kda` take them.

    g is ``−e^{A_log} softplus(a + bias)``, or with a `lower_bound` ``lower_bound · sigmoid(e^{A_log} (a + bias))``; β
    is ``most · sigmoid(b)``. Both are fp32 (fp64 for fp64).

    Args:
        q, k: ``[B, T, HQ, K]``. a: ``[B, T, C]``, C = H decays a head or H · K a channel. b: ``[B, T, H]``.
        A_log: ``[H]``, shared by C / H consecutive channels; None: zeros. bias: ``[C]``.
    """
    if not fused(q):
        return plain_prepare(q, k, a, b, A_log, bias, lower_bound, most, EPS)
    return prepare_op(q, k, a, b, A_log, bias, lower_bound, most, EPS)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _bounded(a: Tensor, A_log: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """a + bias, and what multiplies it before the sigmoid."""
    y = _wide(a) if bias is None else _wide(a) + _wide(bias)
    if A_log is None:
        return y, torch.ones((), dtype=y.dtype, device=y.device)
    return y, _wide(A_log).exp().repeat_interleave(a.shape[-1] // A_log.shape[0])


def plain_prepare(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor | None, bias: Tensor | None, lower_bound: float | None,
    most: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if lower_bound is None:
        g = plain_log_decay(a, A_log, bias, 1.0, 1.0)
    else:
        y, rate = _bounded(a, A_log, bias)
        g = lower_bound * torch.sigmoid(rate * y)
    return plain_unit_length(q, eps), plain_unit_length(k, eps), g, most * torch.sigmoid(_wide(b))


def plain_prepare_backward(
    dq: Tensor, dk: Tensor, dg: Tensor, db: Tensor, q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor | None,
    bias: Tensor | None, lower_bound: float | None, most: float, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, a, b, A_log and bias."""
    s = torch.sigmoid(_wide(b))
    rates = (most * s * (1 - s) * db).to(b.dtype)
    lengths = plain_unit_length_backward(dq, q, eps), plain_unit_length_backward(dk, k, eps)
    if lower_bound is None:
        da, dA, dbias = plain_log_decay_backward(dg, a, A_log, bias, 1.0, 1.0)
        return *lengths, da, rates, dA, dbias
    y, rate = _bounded(a, A_log, bias)
    s = torch.sigmoid(rate * y)
    da = dg * lower_bound * s * (1 - s) * rate
    dA = None
    if A_log is not None:
        dA = (da * y).flatten(0, -2).sum(0).view(A_log.shape[0], -1).sum(1).to(A_log.dtype)
    dbias = None if bias is None else da.flatten(0, -2).sum(0).to(bias.dtype)
    return *lengths, da.to(a.dtype), rates, dA, dbias


def _prepare(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor | None, bias: Tensor | None, lower_bound: float | None,
    most: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `prepare`."""
    kernels = kernels_of("prepare", q, a, b)
    run = plain_prepare if kernels is None else kernels.forward
    q, k, g, beta = run(q, k, a, b, A_log, bias, lower_bound, most, eps)
    return q.contiguous(), k.contiguous(), g.contiguous(), beta.contiguous()


def _prepare_backward(
    grads: Sequence[Tensor | None], q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor | None,
    bias: Tensor | None, lower_bound: float | None, most: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, a and b, then of A_log and the bias where they are given."""
    dq, dk, dg, db = grads
    dq, dk = (torch.zeros_like(x) if d is None else d for d, x in ((dq, q), (dk, k)))
    dg, db = (torch.zeros_like(_wide(x)) if d is None else d for d, x in ((dg, a), (db, b)))
    kernels = kernels_of("prepare", q, a, b)
    run = plain_prepare_backward if kernels is None else kernels.backward
    found = run(dq, dk, dg, db, q, k, a, b, A_log, bias, lower_bound, most, eps)
    return [d.contiguous() for d in found if d is not None]


def _fake(q, k, a, b, *_):
    wide = [x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (a, b)]
    return q.new_empty(q.shape), k.new_empty(k.shape), *wide


prepare_op = Operator("prepare", _prepare, _prepare_backward, _fake, 6)
