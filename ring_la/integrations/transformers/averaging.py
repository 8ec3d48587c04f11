"""Wrappers that average gradients over ranks: under them a model must have been parallelized with ``average=True``."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...errors import UnsupportedError


def refuse_averaging(model: nn.Module, context: set[int]) -> None:
    """Refuse a call of a model whose gradients are to be summed inside a wrapper that averages them.

    Args:
        context: the ranks of the context group, as numbered in the job.
    """
    for wrapper, ranks in averaging(model):
        if len(context) > 1 and context <= ranks:
            hint = f"{wrapper} averages gradients over these ranks: parallelize(…, average=True)"
            raise UnsupportedError("average", f"True under {wrapper}", False, hint)


def averaging(model: nn.Module) -> Iterator[tuple[str, set[int]]]:
    """The wrappers of a model that average, and over which ranks; a divisor or a hook of one's own may do otherwise."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and not ddp._comm_hooks:
        yield "DDP", set(dist.get_process_group_ranks(ddp.process_group))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in groups:
                if group is not None and group.gradient_divide_factor is None:
                    yield "FSDP2", set(group.mesh_info.mesh.mesh.flatten().tolist())
