"""Sums over ranks of many tensors in one exchange: one for each takes more time than a small model does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_la import ContextParallel


def summed(tensors: Mapping[str, Tensor], group: Any) -> dict[str, Tensor]:
    """The sums of tensors over the ranks of a group, by name; every rank brings the same ones, in one order."""
    if not tensors:
        return {}
    flat = torch.cat([x.detach().reshape(-1) for x in tensors.values()])
    dist.all_reduce(flat, group=group)
    parts = flat.split([x.numel() for x in tensors.values()])
    return {n: part.view_as(x).to(x.dtype) for part, (n, x) in zip(parts, tensors.items())}


def summed_gradients(model: nn.Module, cp: ContextParallel) -> dict[str, Tensor]:
    """The sums of the gradients there are of a model's parameters, by name."""
    return summed({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, cp.comm.group)
