"""Short causal convolutions under the library's names."""

from __future__ import annotations

from torch import Tensor

from ....conv import short_conv
from ..call import Call


def causal_conv1d_fn(
    call: Call,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """``causal_conv1d_fn`` of causal_conv1d: ``hidden_states [B, D, T]``, ``weight [D, W]`` → ``[B, D, T]``."""
    activation = "silu" if activation == "swish" else activation
    return short_conv(hidden_states.transpose(1, 2), weight, bias, activation, **call.split).o.transpose(1, 2)
