"""Where a cache of the library has what its layers remember, and how that is put into a new one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import cache_utils

from ...errors import UnsupportedError

KNOWN = (
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
)
"""Layers of caches that hold keys, values, and states of one size, and nothing else."""


class Slot(NamedTuple):
    """Where a state is in a cache: a layer's keys and values (`state` None), or one of its recurrent states."""

    layer: int
    state: int | None


def slots(cache: Any) -> list[Slot]:
    """Where a cache has states, once a token was read."""
    slots, linear = [], getattr(cache, "linear_cache", ())
    for i in range(len(cache)):
        if i < len(linear) and isinstance(linear[i], Tensor):
            slots.append(Slot(i, 0))
        if i >= len(cache.layers):
            continue
        layer = cache.layers[i]
        if type(layer).__name__ not in KNOWN:
            raise UnsupportedError("model", "a cache of keys, values and states", type(layer).__name__)
        for n in range(getattr(layer, "number_of_states", 0)):
            if layer.recurrent_states[n] is not None or layer.conv_states[n] is not None:
                slots.append(Slot(i, n))
        if getattr(layer, "keys", None) is not None:
            slots.append(Slot(i, None))
    return slots


def with_all_keys(layer: Any) -> Any:
    """A new layer of a cache, or one like it that keeps all keys."""
    kind = type(layer).__name__
    if kind == "DynamicSlidingWindowLayer":
        return cache_utils.DynamicLayer()
    if kind == "LinearAttentionAndSlidingWindowAttentionLayer":
        return cache_utils.LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    return layer


def put_keys(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Fill a layer with keys and values ``[N, heads, S, ·]``."""
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values, layer.is_initialized = keys, values, True


def put_state(layer: Any, state: int | None, recurrent: Tensor | None, tail: Tensor | None) -> None:
    """Fill one of a layer's states."""
    for name, x in (("recurrent_states", recurrent), ("conv_states", tail)):
        if x is not None:
            getattr(layer, name)[state] = x
            getattr(layer, f"is_{name}_initialized")[state] = True
            layer.dtype, layer.device = x.dtype, x.device
    if tail is not None:
        layer.conv_kernel_size[state] = tail.shape[-1]
    layer.has_previous_state[state] = True
