"""Losses of the whole sequence, from the parts the ranks have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...autograd import traced
from ...comm import Group
from ...context import ContextRanks, ShardedLayout
from ...context.handle import found
from ...errors import DisagreementError
from ...kernels.fused.operator import fused
from ...models.loss import losses_of

if TYPE_CHECKING:
    from .call import ModelCall


def cross_entropy(call: ModelCall, logits: Tensor, vocab_size: int) -> Tensor:
    """The mean cross-entropy of the whole batch, the same on all ranks; its gradient is this rank's part.

    Where only the head is run it is this rank's part at the head's tokens.
    """
    targets = call.targets
    labels = targets.labels if call.head is None else targets.labels[:, call.head.chunk]
    logits, labels = logits.reshape(-1, vocab_size), labels.reshape(-1).to(logits.device)
    part = sum_of_losses(logits, labels, targets.ignore_index) / targets.divisor
    if call.layout is None or call.head_only:
        return part
    return whole_loss(part, call.layout.cp, call.fingerprint)


def sum_of_losses(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The sum of the cross-entropies of ``logits [N, V]``, fp32; on CUDA by the kernel that makes the gradient beside
    them, in logits' dtype: neither exists in fp32."""
    if fused(logits) and not traced(logits):
        return losses_of(logits, labels, ignored).sum()
    return F.cross_entropy(logits.float(), labels, ignore_index=ignored, reduction="sum")


ROWS = (
    "ring_la.integrations.transformers.ContextTrainer gives the ranks of a context group the same rows; elsewhere a"
    " DataLoader with a DistributedSampler over the data axis alone does"
)
"""What to do where ranks that share a sequence were given different ones."""


def whole_loss(part: Tensor, cp: ContextRanks, fingerprint: Tensor | int) -> Tensor:
    """`WholeLoss` of this rank's part, for torch.compile as one node."""
    if torch.compiler.is_compiling():
        mine = fingerprint if isinstance(fingerprint, Tensor) else torch.full((), fingerprint, device=part.device)
        return _operator(part, mine, cp.number)[0]
    return WholeLoss.apply(part, cp.comm, fingerprint)


class WholeLoss(torch.autograd.Function):
    """The sum over ranks of their parts; each rank's gradient goes back into its own part.

    Ranks also compare what they were given (`fingerprint`). Where it differs a DisagreementError is raised on the CPU;
    on GPUs, where looking would wait for the device, loss and gradients are NaN.
    """

    @staticmethod
    def forward(ctx, part: Tensor, group: Group, fingerprint: Tensor | int) -> Tensor:
        total, ctx.same = _summed(part.double(), group, fingerprint)
        return torch.where(ctx.same, total, torch.nan).to(part.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.where(ctx.same, grad, torch.nan), None, None


@torch.library.custom_op("ring_la::whole_loss", mutates_args=())
def _operator(part: Tensor, fingerprint: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The sum, and whether the ranks were given the same."""
    total, same = _summed(part.double(), found(number).comm, fingerprint)
    return torch.where(same, total, torch.nan).to(part.dtype), same


@_operator.register_fake
def _(part, fingerprint, number):
    return part.new_empty(()), part.new_empty((), dtype=torch.bool)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _back(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return torch.where(ctx.saved_tensors[0], grad, torch.nan), None, None


_operator.register_autograd(_back, setup_context=_save)


def agreed(group: Group, fingerprint: Tensor | int) -> Tensor | None:
    """Whether the ranks were given the same batch, as `WholeLoss` finds it; None where there is nothing to compare."""
    if not isinstance(fingerprint, Tensor):
        return None
    return _summed(torch.zeros((), dtype=torch.float64, device=fingerprint.device), group, fingerprint)[1]


def _summed(part: Tensor, group: Group, fingerprint: Tensor | int) -> tuple[Tensor, Tensor]:
    """The sum of the ranks' parts, fp64, and whether their fingerprints are the same."""
    if isinstance(fingerprint, Tensor):
        mine = fingerprint.to(part)
    else:  # filled in on the device: a copy would wait for it
        mine = part.new_full((), fingerprint)
    total, first, second = group.all_reduce(torch.stack([part, mine, mine * mine])).wait()
    same = group.size * second == first * first
    if not group.on_cuda and not same:
        message = "the ranks of this group disagree on the batch, which every rank must be given whole"
        raise DisagreementError(f"{message}. {ROWS}")
    return total, same


def fingerprint(*tensors: Tensor | None) -> Tensor | int:
    """A number below 2**16 that differs, in all likelihood, between batches of ids or labels ``[B, T]``."""
    out: Tensor | int = 0
    for x in tensors:
        if x is not None and not x.is_floating_point():
            weights = torch.arange(1, x.shape[-1] + 1, device=x.device) * 40503 % 65521
            rows = torch.arange(1, x[..., 0].numel() + 1, device=x.device).view(x.shape[:-1])
            out = (out + ((x.long() * weights).sum(-1) % 65521 * rows).sum()) % 65521
    return out


class GatherForAll(torch.autograd.Function):
    """The rows of all ranks ``[T, …]`` in the order of the sequence, for a loss every rank computes alike.

    The gradient of such a loss is the same on every rank, so each takes its own rows of it.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, layout: ShardedLayout) -> Tensor:
        ctx.layout = layout
        return layout.gather(rows, dim=0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.shard(grad, dim=0), None


def gather_router_logits(logits: Tensor, batch: int, layout: ShardedLayout) -> Tensor:
    """Router logits ``[B·T_local, E]`` (or ``[B, T_local, E]``) of the whole batch, in the same shape."""
    by_token = logits.reshape(batch, layout.local_length, -1).transpose(0, 1)
    whole = GatherForAll.apply(by_token, layout).transpose(0, 1)
    return whole.flatten(0, 1) if logits.dim() == 2 else whole


def gather_tokens(x: Tensor, index: Tensor, layout: ShardedLayout) -> Tensor:
    """The rows ``[B, n, D]`` of ``x [B, T_local, D]`` at places of the whole sequence, on every rank. No gradient."""
    owners, place = layout.owners_of(index)
    mine = (owners == layout.rank).nonzero().flatten()
    out = x.new_zeros(x.shape[0], len(index), *x.shape[2:])
    out[:, mine.to(x.device)] = x[:, place[mine].to(x.device)]
    return layout.cp.comm.all_reduce(out).wait()
