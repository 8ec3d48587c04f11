"""DeepSeek-V3.2's lightning indexer (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", eq. 1 to 4).

    I_ij = Σ_h w_ih relu(q_ihᵀ k_j),       query i reads the `topk` earlier tokens of its document with the largest I

    L = Σ_i KL(p_i ‖ softmax_j I_ij),      p_ij = Σ_h exp(s_ijh − lse_ih) / H

over the chosen j, s the scores of attention.

The choice has no gradient; the indexer learns from L alone, and L's gradient goes to nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..context import ShardedLayout
from ..context.handle import layout_of, number_of
from ..errors import SecondDerivativeError
from ..kernels.choice import triton_installed
from ..schemas import declared
from ..softmax.products import product
from . import loss
from .arguments import Given, check_choice, check_loss, checked, loss_in_one_kernel
from .chosen import Chosen, Rows, best, empty_choice
from .eight_bits import eight_bits

WIDEST = 128
"""Channels of an index key up to which the kernel has run."""


@torch.no_grad()
def lightning_index(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    topk: int,
    *,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    fp8: bool = False,
) -> Chosen:
    """The `topk` tokens each query reads.

    Args:
        q: ``[B, T, Hi, D]``, rotated. k: ``[B, T, D]``, one for all heads, rotated; on one device also of more tokens,
            of which the queries are the last. w: ``[B, T, Hi]``, scales included.
        layout: how the sequence is split; index keys go to every rank. Collective.
        cu_seqlens: documents on one device.
        backend: what forms scores: "triton", one kernel on CUDA, or "torch". None: "triton" on GPUs where it is
            installed, but for fp64 and more than 128 channels.
        fp8: scores of products of 8 bits, as DeepSeek's: q and k rotated by a Hadamard matrix and rounded, a factor
            for each row (`eight_bits`). Some of the tokens chosen are then others.

    Returns:
        Chosen(places int32 ``[B, T, 1, topk]``, scores ``[B, T, 1, topk]``), as `sparse_attention` and `mla` take them.

    Raises:
        ArgumentError: by the name of the argument; under a layout on every rank. DisagreementError.
    """
    if torch.compiler.is_compiling():
        return Chosen(*_index(q, k, w, cu_seqlens, number_of(layout), topk, backend, fp8))
    given: Given = dict(q=(q, 4), k=(k, 3), w=(w, 3))
    longer = layout is None and cu_seqlens is None
    check = functools.partial(check_choice, q, k, w, backend, fp8, longer)
    checked("lightning_index", given, (layout, cu_seqlens), check, topk=topk)
    rows, sizes = Rows.of(q, layout, cu_seqlens, k if layout is None else None), None
    keys, narrow = rows.gather(k), q.dtype != torch.float64 and q.shape[3] <= WIDEST
    if fp8:
        q, keys, w, sizes = eight_bits(q, keys, w)
    if backend == "triton" or (backend is None and q.is_cuda and triton_installed() and narrow):
        from .index_kernel import choose  # needs Triton

        return choose(q, keys, w, rows, topk, sizes)
    if sizes is not None:
        q, keys = q.float(), keys.float() * sizes[..., None]

    def score(strip: slice, some: slice) -> Tensor:
        where = rows.tokens[strip], rows.starts[strip], some.start
        return index_scores(q[:, strip], keys[:, some], w[:, strip], *where)[:, :, None]

    return best(score, rows.total, rows.last + 1, (q.shape[0], q.shape[2]), topk)


@torch.library.custom_op("ring_la::lightning_index", mutates_args=())
def _index(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    cu_seqlens: Tensor | None,
    layout: int,
    topk: int,
    backend: str | None,
    fp8: bool = False,
) -> tuple[Tensor, Tensor]:
    """A call within a compiled graph: places and scores."""
    return lightning_index(q, k, w, topk, layout=layout_of(layout), cu_seqlens=cu_seqlens, backend=backend, fp8=fp8)


_index.register_fake(lambda q, k, w, cu, layout, topk, backend, fp8=False: empty_choice(q, q, 1, topk))


def index_scores(q: Tensor, k: Tensor, w: Tensor, tokens: Tensor, starts: Tensor, first: int) -> Tensor:
    """I, fp32 (fp64 for fp64) ``[B, n, m]``, of queries at `tokens` in documents that begin at `starts`, and of keys
    that stand from `first` on; −∞ where a query may not choose."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s = torch.relu_(product(q.flatten(1, 2), k.mT)).unflatten(1, q.shape[1:3])  # [B, n, Hi, m]
    at, of, start = torch.arange(first, first + k.shape[1], device=q.device), tokens[:, None], starts[:, None]
    return (w.to(wide)[:, :, None] @ s)[:, :, 0].masked_fill_((at > of) | (at < start), -torch.inf)


def lightning_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    chosen: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    *,
    attention_lse: Tensor | None = None,
    scale: float | None = None,
    layout: ShardedLayout | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """L, summed over this rank's tokens: what trains the indexer.

    Args:
        q, k, w: of the indexer, as `lightning_index`; L's gradient goes to them.
        chosen: int ``[B, T, 1, S]``. In a warm-up, where all earlier keys are read, all of them.
        attention_q: ``[B, T, H, K]``. attention_k: ``[B, T, Hk, K]``; of latents ``[B, T, 1, L + R]`` and queries taken
            to them. scale: of attention; None: K**-0.5.
        attention_lse: what attention to the same choice gave, ``[B, H, T]``; without it it is formed here.
        layout, cu_seqlens: as `lightning_index`.
        backend: "torch", or "triton", one kernel on CUDA for 16-bit numbers and one head of attention's keys,
            of which nothing gathered is written down; gradients of k are summed in an order that varies. None:
            "triton" on GPUs where it can.

    Returns:
        A scalar, fp32 (fp64 for fp64). Over the group its sum is that of one process; gradients of k are whole on the
        rank that has it.

    Raises:
        ArgumentError: by the name of the argument; under a layout on every rank. DisagreementError.
    """
    if not torch.compiler.is_compiling():
        given: Given = dict(q=(q, 4), k=(k, 3), w=(w, 3), attention_q=(attention_q, 4), attention_k=(attention_k, 4))
        check = functools.partial(check_loss, q, k, w, chosen, attention_q, attention_k, attention_lse, scale, backend)
        checked("lightning_loss", given, (layout, cu_seqlens), check)
    scale = attention_q.shape[-1] ** -0.5 if scale is None else scale
    picked, low = chosen[:, :, 0], attention_q.detach()
    lse = None if attention_lse is None else attention_lse.detach()
    if torch.compiler.is_compiling():
        keys, whole = (x if layout is None else layout.gather(x) for x in (k, attention_k.detach()))
        return _loss(q, keys, w, picked, low, whole, lse, cu_seqlens, number_of(layout), scale, backend)[0]
    rows = Rows.of(q, layout, cu_seqlens)
    with torch.no_grad():
        whole = rows.gather(attention_k.detach())
    return _Loss.apply(q, rows.gather(k), w, picked, low, whole, lse, scale, rows, backend)


class _Loss(torch.autograd.Function):
    """L and its gradients, which are formed with it."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        chosen: Tensor,
        attention_q: Tensor,
        attention_k: Tensor,
        lse: Tensor | None,
        scale: float,
        rows: Rows,
        backend: str | None,
    ) -> Tensor:
        loss, *found = _formed_by(backend, q, attention_q, attention_k)(
            q, k, w, chosen, attention_q, attention_k, scale, rows, lse
        )
        ctx.save_for_backward(*found)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(x * grad.to(x.dtype) for x in ctx.saved_tensors), *[None] * 7


class LossArguments(NamedTuple):
    """A call of the loss as an operator takes it; k and attention_k are those of the whole sequence, `layout` is a
    number."""

    q: Tensor
    k: Tensor
    w: Tensor
    chosen: Tensor
    attention_q: Tensor
    attention_k: Tensor
    attention_lse: Tensor | None
    cu_seqlens: Tensor | None
    layout: int
    scale: float
    backend: str | None


def _formed_by(
    backend: str | None, q: Tensor, attention_q: Tensor, attention_k: Tensor
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What forms the loss and its gradients."""
    if backend == "triton" or (backend is None and q.is_cuda and loss_in_one_kernel(q, attention_q, attention_k)):
        from . import loss_kernel  # needs Triton

        return loss_kernel.with_gradients
    return loss.with_gradients


def _formed(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = LossArguments(*arguments)
    return _formed_by(x.backend, x.q, x.attention_q, x.attention_k)(
        *x[:6], x.scale, Rows.of(x.q, layout_of(x.layout), x.cu_seqlens), x.attention_lse
    )


_loss = torch.library.custom_op(
    "ring_la::lightning_loss",
    _formed,
    mutates_args=(),
    schema=f"({declared(LossArguments)}) -> (Tensor, Tensor, Tensor, Tensor)",
)
"""The loss within a compiled graph, and gradients of q, k and w."""


@_loss.register_fake
def _(q: Tensor, k: Tensor, w: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = q.new_empty((), dtype=torch.promote_types(q.dtype, torch.float32))
    return loss, q.new_empty(q.shape), k.new_empty(k.shape), w.new_empty(w.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _times(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(g is not None for g in of_gradients):
        raise SecondDerivativeError("lightning_loss has exact first derivatives only; a second one was asked for")
    found = [None if grad is None else x * grad.to(x.dtype) for x in ctx.saved_tensors]
    return *found, *[None] * 8


_loss.register_autograd(_times, setup_context=_keep)
