"""A `HybridLM` whose weights are drawn a block at a time, so that no rank ever has all of them.

    with torch.device("meta"):
        model = HybridLM(config)
    shard_parameters(recompute(model, ["block"]), mesh)
    draw_hybrid(model, device)                     # the same numbers as HybridLM(config) on that device

Models of Transformers have `integrations.transformers.weights.draw_weights`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import ArgumentError
from ..models import HybridLM
from ..models.block import ResidualBlock
from ..models.checks import check_model
from ..nn import RMSNorm


@torch.no_grad()
def draw_hybrid(model: HybridLM, device: torch.device | str) -> HybridLM:
    """Fill a model that was made on the device "meta", and sharded or not: the numbers are those that making it on
    `device` draws from the same state of PyTorch's generator. In place; one block is whole at a time.

    Raises:
        ArgumentError: a model that has weights.
    """
    check_model(model)
    if not all(p.is_meta for p in model.parameters()):
        raise ArgumentError("model", 'one made under torch.device("meta")', "one with weights")
    c = model.config
    with torch.device(device):
        nn.Embedding(c.vocab_size, c.dim)  # drawn first, and again below: as the model itself does
        for i, block in enumerate(model.blocks):
            whole = ResidualBlock.of(c, i)
            HybridLM.scale_residuals(whole, len(c.layers))
            _fill(block, whole)
        _fill(model.norm, RMSNorm(c.dim, c.norm_eps))
        if model.head is not None:
            _fill(model.head, nn.Linear(c.dim, c.vocab_size, bias=False))
        weight = torch.empty(c.vocab_size, c.dim).normal_(std=0.02)
    model.embedding.weight = nn.Parameter(_part(weight, model.embedding.weight))
    return model


def _fill(module: nn.Module, whole: nn.Module) -> None:
    """Give a module the parameters and buffers of another of its kind, this rank's part of each."""
    for (name, into), source in zip(module.named_modules(), whole.modules(), strict=True):
        for n, p in source._parameters.items():
            own = into._parameters[n]
            assert (own is None) == (p is None), f"{name}.{n}"
            if p is not None and own is not None:
                into._parameters[n] = nn.Parameter(_part(p.data, own), own.requires_grad)
        for n, b in source._buffers.items():
            own = into._buffers[n]
            assert (own is None) == (b is None), f"{name}.{n}"
            into._buffers[n] = b if b is None or own is None else b.to(own.dtype)


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a parameter, in memory of its own."""
    whole = whole.to(like.dtype)
    if not isinstance(like, DTensor):
        return whole
    part = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    local = part.to_local()
    if local.untyped_storage().nbytes() > local.nbytes:
        local = local.clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
