"""The channel mixing between the layers of a model: one class a kind, listed in `MLPS`."""

from __future__ import annotations

from torch import nn

from ..nn import MixtureOfExperts
from ..nn.mlp import SwiGLU as SwiGLU

MLPS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU, "moe": MixtureOfExperts}
"""Names of the kinds; each is made as ``kind(dim, hidden, **options)`` and maps ``[B, T, D]`` token by token."""
