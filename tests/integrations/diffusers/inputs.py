"""What the inputs of tiny models are drawn from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Case = Callable[[], tuple[nn.Module, dict[str, object]]]
B, TEXT = 2, 5


def draw(*shape: int) -> Tensor:
    """A leaf in fp64; the caller has seeded."""
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def step() -> Tensor:
    return torch.tensor([7.0, 500.0], dtype=torch.float64)


def latents(*shape: int) -> dict[str, object]:
    return dict(hidden_states=draw(B, 4, *shape), encoder_hidden_states=draw(B, TEXT, 12), timestep=step())
