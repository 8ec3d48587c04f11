"""A rank's part of a parameter, and where it is."""

from __future__ import annotations

import torch
from torch import Tensor
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
