"""A rank's part of a parameter, and where it is; the ranks that have the other parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def device_of(device: torch.device | str | None) -> torch.device:
    """`device`; None: the current GPU, or the CPU without one."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def part_of(p: Tensor, whole: Tensor, device: torch.device) -> Tensor:
    """This rank's part of a whole tensor, in a parameter's dtype."""
    whole = whole.to(device, p.dtype)
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local().clone()


class ModelRanks:
    """The ranks a model is on: those its parameters are sharded and copied over, else all of the job. What tensor
    parallelism has cut is copied over ranks that no parameter tells of, its context ranks among them: all of the job.

    Attributes:
        index: of this rank among them. size: their number.
    """

    def __init__(self, model: nn.Module) -> None:
        meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        split: Any = getattr(model, "_ring_la", None)
        cut = split is not None and len(split.batches.groups) > 1
        mesh = None if cut else max(meshes, key=lambda mesh: mesh.size(), default=None)
        self.groups: list[Any] = []
        self.index, self.size = 0, 1
        if mesh is not None:
            self.groups, self.size = mesh.get_all_groups(), mesh.size()
            self.index = mesh.mesh.flatten().tolist().index(dist.get_rank())
        elif dist.is_initialized():
            self.groups, self.index, self.size = [dist.group.WORLD], dist.get_rank(), dist.get_world_size()

    def meet(self) -> None:
        """All of them are here."""
        for group in self.groups:
            dist.barrier(group)

    def first(self, problem: str) -> str:
        """Of what the ranks say the first that is something, the same on all; "" where none has a problem."""
        for group in self.groups:
            said: list[Any] = [""] * dist.get_world_size(group)
            dist.all_gather_object(said, problem, group)
            problem = next(filter(None, said), "")
        return problem
