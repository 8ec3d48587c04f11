"""Cross-entropy of rows of logits and its gradient in one go: a step of `models.loss`, without a backward of its own.

    loss_i = lse(logits_i) − logits_i[target_i],   d logits_i = softmax(logits_i) − onehot(target_i)

By Triton on CUDA where it can, elsewhere PyTorch's own operations, which a compiler sees too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...autograd import traced
from .operator import kernels_of


def losses_and_gradient(logits: Tensor, targets: Tensor, ignored: int, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The losses of the rows ``[N]`` in fp32 or wider, and if `wanted` the gradient of their sum by the logits.

    Args:
        logits: ``[N, V]``; overwritten. targets: int64 ``[N]``; rows whose target is `ignored` do not count.
    """
    kernels = None if traced(logits) else kernels_of("cross_entropy", logits)
    if kernels is None:
        return plain_losses(logits, targets, ignored, wanted)
    return kernels.forward(logits, targets, ignored, wanted), logits


def plain_losses(logits: Tensor, targets: Tensor, ignored: int, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """`losses_and_gradient` from PyTorch's operations."""
    dtype, logits = logits.dtype, logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = targets != ignored
    at = targets.where(counts, 0)[:, None]
    lse = logits.logsumexp(1, keepdim=True)
    losses = (lse - logits.gather(1, at)).squeeze(1).where(counts, 0)
    if not wanted:
        return losses, None
    d = logits.sub_(lse).exp_()  # the softmax, in place
    d.scatter_add_(1, at, d.new_full((), -1.0).expand_as(at))
    return losses, d.mul_(counts[:, None]).to(dtype)
