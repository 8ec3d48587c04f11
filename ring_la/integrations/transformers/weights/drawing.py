"""Weights drawn by a model's own initialisation, the same for any split."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .parts import device_of, part_of


@torch.no_grad()
def draw_weights(model: PreTrainedModel, *, seed: int = 0, device: torch.device | str | None = None) -> None:
    """Fill a model that was made on the device "meta" by its own initialisation, the same for any split.

    One module's parameters exist whole at a time, drawn alike on every rank, which keeps its part.
    """
    device = device_of(device)
    owner: dict[str, PreTrainedModel] = {}
    for i, (name, module) in enumerate(model.named_modules()):
        above = owner.get(name.rpartition(".")[0], model)
        owner[name] = module if isinstance(module, PreTrainedModel) else above
        parameters = {n: p for n, p in module._parameters.items() if p is not None}
        buffers = {n: b for n, b in module._buffers.items() if b is not None}
        if not parameters and not buffers:
            continue
        for n, p in parameters.items():
            module._parameters[n] = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device), p.requires_grad)
        for n, b in buffers.items():
            module._buffers[n] = torch.zeros(b.shape, dtype=b.dtype, device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(1_000_003 * seed + i)
            owner[name]._init_weights(module)
        for n, p in parameters.items():
            whole = module._parameters[n]
            assert whole is not None
            part = whole.data
            if isinstance(p, DTensor):
                part = _dtensor(part_of(p, whole.data, device), p)
            module._parameters[n] = nn.Parameter(part, p.requires_grad)
    model.tie_weights()


def _dtensor(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
