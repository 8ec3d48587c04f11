"""PEFT's adapters on a model whose own parameters are sharded: every rank has a copy of them.

PEFT takes a sharded weight for one of tensor parallelism and makes adapters for the part of it that is here. While it
works the weights of linear layers are therefore stand-ins of their whole shape, which take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...errors import UnsupportedError


def add_adapters(model: PreTrainedModel, config: Any, *, seed: int = 0) -> Any:
    """`peft.get_peft_model` of a model that FSDP2 has sharded, with the same adapters on every rank.

    Nothing sums the adapters' gradients: do so over all ranks (`sum_gradients`), which is what a small part of a model
    costs least.

    Args:
        config: what PEFT takes, such as a LoraConfig. seed: of the adapters' initialisation.

    Raises:
        UnsupportedError: modules_to_save.
    """
    from peft import get_peft_model

    if getattr(config, "modules_to_save", None):
        hint = "Their copies would be whole on every rank"
        raise UnsupportedError("modules_to_save", "None on a sharded model", config.modules_to_save, hint)
    with _whole_weights(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types of models whose "out_proj" PEFT refuses (0.21): the library's fused kernels read its weight past an adapter."""


def all_linear(model: PreTrainedModel) -> dict[str, Any]:
    """The keywords of a LoraConfig that adapts every linear layer that PEFT takes."""
    mamba = model.config.get_text_config().model_type in MAMBAS
    return {"target_modules": "all-linear"} | ({"exclude_modules": ["out_proj"]} if mamba else {})


@contextmanager
def _whole_weights(model: nn.Module) -> Iterator[None]:
    """Stand-ins for sharded weights: one number, seen as often as the weight has."""
    weights = [(m, m._parameters["weight"]) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    sharded = [(m, p) for m, p in weights if p is not None and isinstance(p, DTensor)]
    try:
        for m, p in sharded:
            one = torch.zeros(1, dtype=p.dtype, device=p.device)
            m._parameters["weight"] = nn.Parameter(one.expand(p.shape), requires_grad=False)
        yield
    finally:
        for m, p in sharded:
            p.requires_grad_(False)
            m._parameters["weight"] = p
