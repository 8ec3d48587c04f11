"""The peer of ``ring-la bench diffusion``: Diffusers' own context parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

PEERS = ("diffusers_ulysses", "diffusers_ring", "diffusers_ulysses_anything")


def diffusers_parallel(model: nn.Module, arm: str, ranks: int, kernel: str | None) -> nn.Module:
    """The model under Diffusers' parallelism, which uses the default group."""
    from diffusers import ContextParallelConfig

    if kernel is not None:
        model.set_attention_backend(kernel)
    how: dict[str, Any] = dict(ring_degree=ranks) if arm == "diffusers_ring" else dict(ulysses_degree=ranks)
    if arm == "diffusers_ulysses_anything":
        how["ulysses_anything"] = True
    model.enable_parallelism(config=ContextParallelConfig(**how))
    return model
