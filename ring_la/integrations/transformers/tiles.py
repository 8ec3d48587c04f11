"""MLPs of Transformers over some tokens at a time, forward and backward: their inner activations are that few."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...errors import ArgumentError, UnsupportedError


def tile_mlps(model: PreTrainedModel, chunk: int) -> list[nn.Module]:
    """Let every dense MLP take at most `chunk` tokens at a time, computing each part again in the backward pass.

    In place, after `parallelize`. Within a layer that is recomputed, an MLP is so computed a third time.

    Returns:
        The modules: those whose class is named …MLP and has a projection down. Mixtures keep their experts as they are.

    Raises:
        ArgumentError: a chunk below 1. UnsupportedError: a model without such modules.
    """
    if not isinstance(chunk, int) or chunk < 1:
        raise ArgumentError("chunk", "an int ≥ 1", repr(chunk))
    found = [m for m in model.modules() if type(m).__name__.endswith("MLP") and hasattr(m, "down_proj")]
    if not found:
        raise UnsupportedError("model", "one with dense MLPs", type(model).__name__)
    for module in found:
        whole = module.forward

        def forward(self: Any, x: Tensor, whole: Any = whole) -> Tensor:
            if x.shape[-2] <= chunk:
                return whole(x)
            return torch.cat([checkpoint(whole, part, use_reentrant=False) for part in x.split(chunk, -2)], -2)

        module.forward = types.MethodType(forward, module)
    return found
