"""What a model of Transformers remembers of sequences, as rows: read on, decoded side by side, joined and kept.

A cache of the library holds one batch of one length, and grows by being copied. Here it is a list of states like those
of a `HybridLM`: keys and values (`KVCache`; `KVRows` while sequences of any lengths are decoded side by side), and
states of recurrences and tails of convolutions (`LayerState`), each with a row a sequence. For a call they are put into
a cache of the library, whose layers keep all keys. What a step does with keys is in `next_token`; over states at fixed
addresses (`StaticKeys`) it is the same for all values.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ...errors import UnsupportedError
from ...inference import Prefilled
from ...keystore.static import StaticKeys
from ...nn import KVCache, LayerState
from ...nn.decoding import KVRows
from .attention import AttentionNames
from .cache import WatchedCache
from .call import Current, ModelCall
from .masks import make_mask
from .mixers import goes_on, make_forward, scans
from .mixers.indexed import is_matrix
from .mixers.latents import caches_latents
from .next_token import ROWS, ExpertNames, KeysOfStep, attend_rows
from .step_parts import shorten

KNOWN = (
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
)
"""Layers of caches that hold keys, values, and states of one size, and nothing else."""


class Slot(NamedTuple):
    """Where a state is in a cache: a layer's keys and values (`state` None), or one of its recurrent states."""

    layer: int
    state: int | None


class Sequences:
    """A model of Transformers whose sequences are rows. Collective where it is parallelized, but for `step`.

    Args:
        model: its attention goes through the library's attention and mask functions, or its cache has states alone.

    Attributes:
        goes_on: whether tokens after others are split over the ranks, too, where the model is parallelized.

    Raises:
        UnsupportedError: its cache has something else than keys, values and states of one size.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(ROWS, attend_rows)
        AttentionMaskInterface.register(ROWS, make_mask)
        self.model, self._split = model, getattr(model, "_ring_la", None)
        self._names = AttentionNames(model) if self._split is None else self._split.attention
        self.goes_on = goes_on(model)
        self._takes = inspect.signature(model.forward).parameters
        self.name = "cache_params" if "cache_params" in self._takes else "past_key_values"
        self._step, self._experts = KeysOfStep(), ExpertNames(model)
        self._alone, self._scans = Current(), False  # of a model that is not split
        self._latents: dict[int, bool] = {}  # layers that have them, and whether one matrix says what they become
        for module in model.modules():
            module._ring_la_rows = self._step  # type: ignore[assignment]
            self._scans = self._scans or scans(module)
            if scans(module) and self._split is None and "forward" not in vars(module):
                module.forward = types.MethodType(make_forward(type(module), self._alone), module)
            if hasattr(module, "expand_kv") and caches_latents(type(module)):  # type: ignore[arg-type]
                self._latents[int(module.layer_idx)] = is_matrix(module.kv_b_proj)  # type: ignore[arg-type]
        self._short = False
        out = self._call(torch.zeros(1, 1, dtype=torch.int64, device=model.device), None, None)
        if not isinstance(out[self.name], (DynamicCache, MiniMaxCache)):
            raise UnsupportedError("model", "one with a cache of the library", type(out[self.name]).__name__)
        self._of_minimax = isinstance(out[self.name], MiniMaxCache)
        self._slots = _slots(out[self.name])

    def read(self, ids: Tensor, states: Sequence[Any] | None) -> Prefilled:
        """Read ``ids [N, T]`` after what `states` have of as many sequences of one length (none are written to)."""
        if states is not None and self._scans and self._split is not None and not self._is_split(ids):
            for token in ids.unbind(1):  # so few that no rank has two
                out = self.step(token, states, in_place=False)
                states = out.states
            return out
        if states is None:
            cache, positions = self._empty(), None
        else:
            cache, length = self._cache(states, own=False), _length(states)
            at = None if length is None else torch.arange(length, length + ids.shape[1], device=ids.device)
            positions = None if at is None else at[None].expand(len(ids), -1)
        with self._going_on(cache, states is not None):
            out = self._call(ids, cache, positions)
        return Prefilled(out.logits[:, -1], self._taken(cache))

    def step(self, tokens: Tensor, states: Sequence[Any], in_place: bool) -> Prefilled:
        """Read one more token of each sequence, ``tokens [N]``; keys in `KVRows` or `StaticKeys` are written there.

        in_place: states of one size are written over those given.
        """
        rows = next((state for state in states if isinstance(state, (KVRows, StaticKeys))), None)
        cache = self._cache(states, own=in_place)
        if rows is None:
            length = _length(states)
            positions = None if length is None else torch.full_like(tokens[:, None], length)
            out = self._call(tokens[:, None], cache, positions)
            return Prefilled(out.logits[:, -1], self._taken(cache))
        self._step.lengths = rows.length
        try:
            fixed = self._step.fixed = isinstance(rows, StaticKeys)
            if fixed and not self._short:
                self._short = True
                shorten(self.model, lambda: self._step.fixed)
            with self._names.in_whole_calls(ROWS), self._experts.in_steps() if fixed else nullcontext():
                out = self._call(tokens[:, None], cache, rows.length[:, None])
        finally:
            self._step.clear()
        after = [old if isinstance(old, (KVRows, StaticKeys)) else new for old, new in zip(states, self._taken(cache))]
        return Prefilled(out.logits[:, -1], after)

    def _is_split(self, ids: Tensor) -> bool:
        """Whether tokens after others are split over the ranks."""
        return self.goes_on and self._split.batches.least(ids.shape[1]) > 1

    def _going_on(self, cache: Cache, filled: bool) -> AbstractContextManager[None]:
        """Within it layers go on from a cache."""
        if self._split is not None:
            return self._split.current.going_on() if self.goes_on else nullcontext()
        if self._scans and filled:
            return self._alone.during(ModelCall(None, earlier=WatchedCache(cache)))
        return nullcontext()

    @torch.no_grad()
    def _call(self, ids: Tensor, cache: Cache | None, positions: Tensor | None) -> Any:
        """The model on tokens after those of a cache."""
        keywords: dict[str, Any] = {self.name: cache}
        if positions is not None and "position_ids" in self._takes:
            keywords["position_ids"] = positions
        if self._split is not None or "logits_to_keep" in self._takes:
            keywords["logits_to_keep"] = 1
        return self.model(input_ids=ids, use_cache=True, **keywords)

    # -- between a cache and states ------------------------------------------------------------------------

    def _empty(self) -> Cache:
        """A new cache, in which windows keep all keys."""
        cache = MiniMaxCache() if self._of_minimax else DynamicCache(config=self.model.config)
        cache.layers = [_with_all_keys(layer) for layer in cache.layers]
        return cache

    def _cache(self, states: Sequence[Any], own: bool) -> Cache:
        """A cache that has these states; `own`: it may write to them."""
        cache, length = self._empty(), _longest(states)
        nothing = torch.zeros(1, dtype=self.model.dtype, device=self.model.device)
        for slot, state in zip(self._slots, states, strict=True):
            while len(cache.layers) <= slot.layer:
                cache.layers.append(cache_utils.DynamicLayer())
            layer: Any = cache.layers[slot.layer]
            if isinstance(state, KVRows):
                layer.update = functools.partial(self._step.put, state, slot.layer in self._latents)
            elif isinstance(state, StaticKeys):
                layer.update = self._update_of(slot.layer, state)
            elif isinstance(state, KVCache):
                _put_keys(layer, state.k.transpose(1, 2), state.v.transpose(1, 2))
            else:
                recurrent, tail = (x if x is None or own else x.clone() for x in (state.recurrent, state.tail))
                if self._of_minimax:
                    cache.set_linear_cache(slot.layer, recurrent)  # type: ignore[attr-defined]
                else:
                    _put_state(layer, slot.state, recurrent, tail)
        for layer in cache.layers:  # that are asked how many tokens there are
            if length and not getattr(layer, "is_initialized", True):
                _put_keys(layer, *[nothing.expand(1, 1, length, 1)] * 2)
        return cache

    def _update_of(self, layer: int, keys: StaticKeys) -> Callable[..., Any]:
        """What takes a layer's new keys where they have fixed addresses."""
        if layer not in self._latents:
            return functools.partial(self._step.put, keys, False)
        if not self._latents[layer]:
            raise UnsupportedError("capture", "False for latents that more than one matrix expands", f"layer {layer}")
        return functools.partial(self._step.put_latents, layer, keys)

    def _taken(self, cache: Any) -> list[Any]:
        """What a cache has."""
        states: list[Any] = []
        for number, state in self._slots:
            layer = cache.layers[number] if number < len(cache.layers) else None
            if state is None:
                states.append(KVCache(layer.keys.transpose(1, 2), layer.values.transpose(1, 2), None))
            elif self._of_minimax:
                states.append(LayerState(cache.linear_cache[number]))
            else:
                states.append(LayerState(layer.recurrent_states[state], layer.conv_states[state]))
        return states


def _slots(cache: Any) -> list[Slot]:
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


def _with_all_keys(layer: Any) -> Any:
    """A new layer of a cache, or one like it that keeps all keys."""
    kind = type(layer).__name__
    if kind == "DynamicSlidingWindowLayer":
        return cache_utils.DynamicLayer()
    if kind == "LinearAttentionAndSlidingWindowAttentionLayer":
        return cache_utils.LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    return layer


def _put_keys(layer: Any, keys: Tensor, values: Tensor) -> None:
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values, layer.is_initialized = keys, values, True


def _put_state(layer: Any, state: int | None, recurrent: Tensor | None, tail: Tensor | None) -> None:
    for name, x in (("recurrent_states", recurrent), ("conv_states", tail)):
        if x is not None:
            getattr(layer, name)[state] = x
            getattr(layer, f"is_{name}_initialized")[state] = True
            layer.dtype, layer.device = x.dtype, x.device
    if tail is not None:
        layer.conv_kernel_size[state] = tail.shape[-1]
    layer.has_previous_state[state] = True


def _length(states: Sequence[Any]) -> int | None:
    """Tokens of sequences of one length; None: the states do not say, and no layer needs to know."""
    return next((state.k.shape[1] for state in states if isinstance(state, KVCache)), None)


def _longest(states: Sequence[Any]) -> int:
    """Tokens of the longest sequence; of fixed addresses, what there is room for in a step."""
    fixed = next((state for state in states if isinstance(state, StaticKeys)), None)
    if fixed is not None:
        return fixed.rows.columns
    rows = next((state for state in states if isinstance(state, KVRows)), None)
    return (_length(states) or 0) if rows is None else max(rows.seats.lengths)
