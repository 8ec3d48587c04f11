"""The norm of gradients on several meshes: experts are sharded over other ranks than the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ArgumentError
from .gradients import parameters_of


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale gradients so that their norm over all parameters is at most `most`; the norm before. Collective.

    As `torch.nn.utils.clip_grad_norm_`, which takes parameters of one mesh.

    Raises:
        ArgumentError: no parameters, or a norm that is not above 0.
    """
    if not isinstance(most, (int, float)) or isinstance(most, bool) or not most > 0:
        raise ArgumentError("most", "a norm above 0; math.inf clips nothing", repr(most))
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters_of(parameters):
        if p.grad is not None:
            by_mesh.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p)
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm() if norms else torch.zeros(())
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, most, total, foreach=False)
    return total
