"""Where a cache of the library has what its layers remember, and how that is put into a new one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ...errors import UnsupportedError
from ...nn import LayerState

KNOWN = (
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
)
"""Layers of caches that hold keys, values, and states of one size, and nothing else."""


class Slot(NamedTuple):
    """Where a state is in a cache: a layer's keys and values (`state` None), or one of its recurrent states."""

    layer: int
    state: int | None


class LayeredStates:
    """States in the layers of a `DynamicCache`."""

    holds: type = DynamicCache

    def empty(self, config: PreTrainedConfig) -> Any:
        """A new cache, in which windows keep all keys; None: the model makes its own."""
        cache = self.holds(config=config)
        cache.layers = [with_all_keys(layer) for layer in cache.layers]
        return cache

    def slots(self, cache: Any) -> list[Slot]:
        """Where a cache has states, once a token was read."""
        found = []
        for i, layer in enumerate(cache.layers):
            if type(layer).__name__ not in KNOWN:
                raise UnsupportedError("model", "a cache of keys, values and states", type(layer).__name__)
            for n in range(getattr(layer, "number_of_states", 0)):
                if layer.recurrent_states[n] is not None or layer.conv_states[n] is not None:
                    found.append(Slot(i, n))
            if getattr(layer, "keys", None) is not None:
                found.append(Slot(i, None))
        return found

    def put(self, cache: Any, slot: Slot, recurrent: Tensor | None, tail: Tensor | None) -> None:
        """Write a state into a new cache."""
        put_state(cache.layers[slot.layer], slot.state, recurrent, tail)

    def taken(self, cache: Any, slot: Slot) -> LayerState:
        """A state that a cache has."""
        layer = cache.layers[slot.layer]
        return LayerState(layer.recurrent_states[slot.state], layer.conv_states[slot.state])


class MiniMaxStates(LayeredStates):
    """States beside the layers, of which a last one that has no keys may be missing."""

    holds = MiniMaxCache

    def empty(self, config: PreTrainedConfig) -> Any:
        return MiniMaxCache()

    def slots(self, cache: Any) -> list[Slot]:
        keys = {slot.layer: slot for slot in super().slots(cache)}
        states = {i: Slot(i, 0) for i, x in enumerate(cache.linear_cache) if isinstance(x, Tensor)}
        return [of[i] for i in range(len(cache)) for of in (states, keys) if i in of]

    def put(self, cache: Any, slot: Slot, recurrent: Tensor | None, tail: Tensor | None) -> None:
        cache.set_linear_cache(slot.layer, recurrent)

    def taken(self, cache: Any, slot: Slot) -> LayerState:
        return LayerState(cache.linear_cache[slot.layer])


class ListedStates(LayeredStates):
    """States that are a list of tensors ``[B, D, layers]`` (RWKV-4)."""

    holds = list

    def empty(self, config: PreTrainedConfig) -> Any:
        return None

    def slots(self, cache: Any) -> list[Slot]:
        return [Slot(0, n) for n in range(len(cache))]

    def put(self, cache: Any, slot: Slot, recurrent: Tensor | None, tail: Tensor | None) -> None:
        cache.append(recurrent)

    def taken(self, cache: Any, slot: Slot) -> LayerState:
        return LayerState(cache[slot.state])


KINDS: tuple[type[LayeredStates], ...] = (MiniMaxStates, ListedStates, LayeredStates)


def kind_of(cache: Any) -> LayeredStates:
    """Where a cache like this has its states.

    Raises:
        UnsupportedError: nothing is known of it.
    """
    for kind in KINDS:
        if isinstance(cache, kind.holds):
            return kind()
    raise UnsupportedError("model", "one with a cache of the library", type(cache).__name__)


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
