"""A model with every kind of layer that goes on from a cache on split tokens, and the tokens it must generate."""

from __future__ import annotations

import torch

from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import LAYERS

WHOLE = ("nsa", "dsa", "moba")
"""Layers that do not go on from a cache on split tokens."""


def make(without: tuple[str, ...] = WHOLE) -> HybridLM:
    """Every kind of layer but some in one model."""
    torch.manual_seed(0)
    options = {
        "attention": {"num_kv_heads": 2},
        "nsa": {"num_kv_heads": 2, "length": 4, "stride": 2, "block": 4, "topk": 3, "window": 3},
        "dsa": {"topk": 4, "index_heads": 12, "index_dim": 4},
        "moba": {"num_kv_heads": 2, "block": 4, "topk": 2},
        "mamba2": {"state_dim": 4},
        "mamba3": {"state_dim": 4},
        "gsa": {"slots": 4},
        "log_linear_mamba2": {"state_dim": 4, "levels": 12},
        "mesa_net": {"steps": 3},  # each an exchange
    }
    kinds = [name for name in LAYERS if name not in without]
    model = HybridLM(HybridConfig(19, 16, kinds, 4, options=options)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(1))


def greedy(model: HybridLM, ids: torch.Tensor, n: int) -> torch.Tensor:
    """The truth: the whole text again for every token."""
    for _ in range(n):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[:, -n:]
