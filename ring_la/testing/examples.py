"""Examples of a recurrence's arguments, drawn by what its definition says of them: decays that differ per head and
token, packed documents, odd lengths."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recurrences.arguments import Argument
from ..recurrences.definition import Definition

DOCUMENTS = {
    "dense": (144, None),
    "uneven": (131, None),
    "packed": (150, (0, 7, 7, 8, 70, 71, 150)),  # an empty document, one token long ones, one over many shards
    "many": (97, (0, 3, 5, 9, 14, 20, 27, 35, 44, 54, 65, 77, 90, 97)),
    "single": (118, (0, 118)),
    "short": (3, None),
    "small": (26, None),
    "small packed": (38, (0, 0, 5, 6, 29, 38)),
    "short packed": (3, (0, 1, 3)),
}
"""name: (tokens of the whole sequence, cu_seqlens or None for an unpacked batch)."""


def gates(*shape: int, generator: torch.Generator, heads: int = 2) -> Tensor:
    """Log-decays from nearly none to strong forgetting, different per head and per token, fp64."""
    strength = torch.logspace(-3, 0.5, shape[heads], dtype=torch.float64)
    strength = strength.view(*[1] * heads, -1, *[1] * (len(shape) - heads - 1))
    return -strength * torch.rand(*shape, generator=generator, dtype=torch.float64)


def make_arguments(
    definition: Definition,
    B: int = 1,
    T: int = 100,
    Hk: int = 2,
    H: int = 4,
    K: int = 6,
    V: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """A recurrence's own arguments by name; floats are leaves that want gradients."""
    rng = torch.Generator().manual_seed(seed)
    sizes = {"B": B, "T": T, "G": Hk, "H": H, "K": K, "V": V} | dict(definition.sizes)
    drawn: dict[str, Tensor] = {}
    for name, argument in definition.arguments.items():
        drawn[name] = _draw(argument, tuple(sizes[letter] for letter in argument.shape), rng, drawn)
    leaves = {n: x.to(dtype).contiguous().requires_grad_() for n, x in drawn.items()}
    return leaves | dict(definition.flags)


def _draw(argument: Argument, shape: tuple[int, ...], rng: torch.Generator, drawn: dict[str, Tensor]) -> Tensor:
    normal = functools.partial(torch.randn, generator=rng, dtype=torch.float64)
    if callable(argument.kind):
        return argument.kind(normal, drawn, shape)
    if argument.kind == "log decay":
        if argument.shared:
            return -torch.logspace(-3, 0, shape[0], dtype=torch.float64)
        return gates(*shape, generator=rng)
    x = normal(*shape)
    if argument.kind in ("key", "unit", "unit value"):
        return F.normalize(x, dim=-1)
    return x.sigmoid() if argument.kind == "rate" else x


def make_states(
    definition: Definition, N: int, H: int = 4, K: int = 6, V: int = 5, seed: int = 1
) -> tuple[Tensor, ...]:
    """The parts of N documents' states, fp64; positive where a part has no values, and so are square ones of keys."""
    rng = torch.Generator().manual_seed(seed)
    sizes = {"H": H, "K": K, "V": V} | dict(definition.sizes)
    parts = []
    for part in definition.states:
        x = torch.randn(N, *(sizes[letter] for letter in part), generator=rng, dtype=torch.float64)
        x = x @ x.mT / K if part.endswith("KK") else x
        parts.append(x if len(part) != 2 else x.abs())
    return tuple(parts)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error ‖got − want‖ / ‖want‖ (absolute where want is all zero); NaN counts as infinite."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    norm = want.norm()
    return float((got - want).norm() / norm) if norm > 0 else float((got - want).norm())
