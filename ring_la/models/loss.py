"""Cross-entropy of a linear output layer without its logits: rows are taken in chunks, forward and backward in one go.

    logits = x Wᵀ,   loss = Σ_i (lse(logits_i) − logits_i[target_i]),   d logits = softmax(logits) − onehot(target)

Gradients of a chunk are formed while its logits are there (as in Liger Kernel, arXiv 2410.10989, §3.2), so that the
largest tensor is ``[chunk, V]`` whatever the number of tokens.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import first_derivative_only, outside_graphs, traced
from ..blockwise import at_once, by_block, token_sum
from ..context import ShardedLayout
from ..errors import ArgumentError, UnsupportedError, describe_tensor
from ..kernels.fused.cross_entropy import losses_and_gradient
from .checks import IGNORE as IGNORE
from .checks import check_chunk

BACKENDS = ("auto", "chunked", "liger")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 8192,
    ignore_index: int = IGNORE,
    backend: str = "auto",
) -> Tensor:
    """Sum over the rows of the cross-entropy of ``x weightᵀ``; logits of at most `chunk` rows exist at a time.

    Args:
        x: ``[N, D]``, floats. weight: ``[V, D]`` of the same dtype. targets: int64 ``[N]``.
        chunk: rows taken at once by "chunked"; Liger picks its own.
        ignore_index: the target of rows that do not count.
        backend: "chunked", which is "auto": this file, any device and dtype; by a Triton kernel on CUDA. "liger":
            liger-kernel's (CUDA), whose forward waits for the host; it has not been run. (PyTorch 2.13's own rounds the
            sum to bf16.)

    Returns:
        The sum, fp32 (fp64 for fp64). Differentiable once in `x` and `weight`.

    Raises:
        ArgumentError: a wrong argument. UnsupportedError: a backend that is not there.
    """
    _check(x, weight, targets, chunk, backend)
    if backend == "liger":
        return _liger(x, weight, targets, ignore_index)
    if traced(x):
        needed = (torch.is_grad_enabled() and t.requires_grad for t in (x, weight))
        return _operator(x, weight, targets, chunk, ignore_index, *needed)[0]
    return _Chunked.apply(x, weight, targets, chunk, ignore_index)


def cross_entropy_by_block(logits: Tensor, targets: Tensor, layout: ShardedLayout) -> Tensor:
    """This rank's part of the sum over all tokens of the cross-entropy of ``logits [B, T, V]``, summed exactly; of the
    same bits however the sequence is split (see `blockwise`). Targets ``[B, T]``."""

    def losses(y: Tensor, labels: Tensor) -> Tensor:
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        flat = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
        return flat.view(labels.shape)

    if at_once(logits):
        return token_sum(_losses_at_once(logits, targets), layout=layout)
    return token_sum(by_block(losses, logits, targets, layout=layout), layout=layout)


class _Losses(torch.autograd.Function):
    """Losses ``[…]`` of ``logits […, V]``, each by its own row; the gradient is formed beside them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        own = logits.clone(memory_format=torch.contiguous_format).flatten(0, -2)
        losses, d = losses_and_gradient(own, targets.flatten(), ignored, wanted)
        ctx.save_for_backward(d)
        return losses.view(targets.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        (d,) = ctx.saved_tensors
        return (d * grad.reshape(-1, 1).to(d.dtype)).view(*grad.shape, d.shape[-1]), None, None


@outside_graphs
def _losses_at_once(logits: Tensor, targets: Tensor) -> Tensor:
    return losses_of(logits, targets)


def losses_of(logits: Tensor, targets: Tensor, ignored: int = IGNORE) -> Tensor:
    """Cross-entropies ``[…]`` of rows ``logits […, V]``, in fp32 or wider; what is kept is their gradient."""
    return _Losses.apply(logits, targets, ignored)


def has_liger() -> bool:
    """Whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def _check(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, backend: str) -> None:
    if backend not in BACKENDS:
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", repr(backend))
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise ArgumentError("x", "floats [N, D]", describe_tensor(x))
    N, D = x.shape
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != D or weight.dtype != x.dtype:
        raise ArgumentError("weight", f"{x.dtype} [V, {D}]", describe_tensor(weight))
    if not isinstance(targets, Tensor) or targets.shape != (N,) or targets.dtype != torch.int64:
        raise ArgumentError("targets", f"torch.int64 [{N}]", describe_tensor(targets))
    for name, t in (("weight", weight), ("targets", targets)):
        if t.device != x.device:
            raise ArgumentError(name, f"a tensor on {x.device}, where x is", t.device)
    check_chunk(chunk)


def _in_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, ignore_index: int, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, and the gradients of x and the weight, empty where not needed."""
    wide = torch.promote_types(x.dtype, torch.float32)
    loss = x.new_zeros((), dtype=wide)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format) if need_weight else None
    for i in range(0, len(x), chunk):
        rows, labels = x[i : i + chunk], targets[i : i + chunk]
        logits = F.linear(rows, weight)
        losses, d = losses_and_gradient(logits, labels, ignore_index, need_x or need_weight)
        loss += losses.sum()
        if need_x and d is not None:
            dx[i : i + chunk] = d @ weight
        if dweight is not None and d is not None:
            dweight += d.T @ rows
    return loss, dx, weight.new_empty(0) if dweight is None else dweight.to(weight.dtype)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, ignore_index: int) -> Tensor:
        loss, *grads = _in_chunks(x, weight, targets, chunk, ignore_index, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(*[d if need else None for d, need in zip(grads, ctx.needs_input_grad)])
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        dx, dweight = (None if d is None else d * grad.to(d.dtype) for d in ctx.saved_tensors)
        return dx, dweight, None, None, None


_operator = torch.library.custom_op("ring_la::linear_cross_entropy", _in_chunks, mutates_args=())
"""For who must see one node whatever the number of chunks."""


@_operator.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, ignore_index: int, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    dx, dweight = (t.new_empty(t.shape if need else (0,)) for t, need in ((x, need_x), (weight, need_weight)))
    return x.new_empty((), dtype=wide), dx, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needed = inputs[-2:]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _scaled(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = [d * grad.to(d.dtype) if need else None for d, need in zip(ctx.saved_tensors, ctx.needed)]
    return (*grads, *[None] * 5)


_operator.register_autograd(_scaled, setup_context=_save)


def _liger(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    if not has_liger():
        raise UnsupportedError("backend", "'chunked', or an environment with liger-kernel", "'liger'")
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        fused_linear_cross_entropy as liger,
    )

    loss = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index, reduction="sum", accum_dtype=torch.float32)
    return loss(weight, x, targets)
