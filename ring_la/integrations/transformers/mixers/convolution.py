"""Short causal convolutions under the library's names."""

from __future__ import annotations

from torch import Tensor
from transformers.activations import ACT2FN

from ....conv import short_conv
from ..call import ModelCall


def causal_conv1d_fn(
    call: ModelCall,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """``causal_conv1d_fn`` of causal_conv1d: ``hidden_states [B, D, T]``, ``weight [D, W]`` → ``[B, D, T]``."""
    silu = activation in ("silu", "swish")
    before = None if call.earlier is None else call.earlier.tail(weight.shape[-1] - 1)
    x = hidden_states.transpose(1, 2)
    how = dict(weight=weight, bias=bias, activation="silu" if silu else None, initial_state=before)
    out = call.operator(short_conv, x, **how).o
    out = out if silu or activation is None else ACT2FN[activation](out)
    return out.transpose(1, 2)


SHORT_CONV = {"causal_conv1d_fn": causal_conv1d_fn}

MIXERS = {"Lfm2ShortConv": SHORT_CONV, "Lfm2MoeShortConv": SHORT_CONV, "Lfm3ShortConv": SHORT_CONV}
