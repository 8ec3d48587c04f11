"""Mixtures of experts for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_la.nn import MixtureOfExperts
from tests.nn.test_sharded import close

DIM, HIDDEN, EXPERTS = 8, 6, 5

COEFFICIENTS = {"balance_coef": 0.7, "z_coef": 0.3}
"""Large, so that an error in the auxiliary loss shows."""
OPTIONS = {
    "top 1": {"top_k": 1, "renormalize": False},
    "top 2": {"top_k": 2},
    "top 3, shared": {"top_k": 3, "renormalize": False, "shared_hidden": 4},
    "all, shared and gated": {"top_k": EXPERTS, "shared_hidden": 4, "shared_gate": True},
}


def same(a: Tensor, b: Tensor, label: str = "") -> None:
    close(a.detach(), b.detach(), label)


def make(dtype: torch.dtype = torch.float64, **options) -> MixtureOfExperts:
    torch.manual_seed(0)
    options = {"experts": EXPERTS, **COEFFICIENTS, **options}
    layer = MixtureOfExperts(DIM, HIDDEN, **options).to(dtype)
    with torch.no_grad():
        layer.router.weight.mul_(3)  # some experts are clearly more liked than others
    return layer


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, DIM, dtype=dtype, generator=torch.Generator().manual_seed(7))


def gradients(layer: torch.nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
    return {n: p.grad for n, p in layer.named_parameters()} | {str(i): t.grad for i, t in enumerate(tensors)}
