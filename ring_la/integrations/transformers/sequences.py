"""What a model of Transformers remembers of sequences, as rows: read on, decoded side by side, joined and kept.

A cache of the library holds one batch of one length, and grows by being copied. Here it is a list of states like those
of a `HybridLM`: keys and values (`KVCache`; `KVRows` while sequences of any lengths are decoded side by side), and
states of recurrences and tails of convolutions (`LayerState`), each with a row a sequence. For a call they are put into
a cache of the library, whose layers keep all keys. While sequences are decoded side by side its attention layers hand
on the new token's keys alone, and the attention function `attend_rows` finds the rows these belong to.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ...errors import UnsupportedError
from ...inference import Prefilled
from ...nn import KVCache, LayerState
from ...nn.decoding import KVRows, one_query
from .attention import AttentionKeywords, AttentionNames, read_mask
from .masks import CausalMask, make_mask
from .mixers import goes_on
from .mixers.latents import caches_latents

ROWS = "ring_la_rows"
"""The name of `attend_rows` in the registries of attention and mask functions."""
KNOWN = (
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
)
"""Layers of caches that hold keys, values, and states of one size, and nothing else."""


class Slot(NamedTuple):
    """Where a state is in a cache: a layer's keys and values (`state` None), or one of its recurrent states."""

    layer: int
    state: int | None


class KeysOfStep:
    """The keys of a step under way, which a model's modules find as ``_ring_la_rows``."""

    def __init__(self) -> None:
        self.lengths: Tensor | None = None
        self._put: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the rows, by the new keys

    def put(self, rows: KVRows, padded: bool, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """In place of a cache layer's ``update``: the new token's ``[N, H, 1, D]`` as they are; `padded`: all tokens'
        of all sequences, padded to the longest."""
        if not padded:
            self._put[k] = rows
            return k, v
        written = zip(*rows.written(k.transpose(1, 2), v.transpose(1, 2)))
        keys, values = (pad_sequence(list(x), batch_first=True).transpose(1, 2) for x in written)
        return keys, values

    def rows_of(self, key: Tensor) -> KVRows | None:
        """The rows whose new keys these are."""
        return self._put.get(key)

    def clear(self) -> None:
        self.lengths = None
        self._put.clear()


def attend_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: CausalMask, **keywords: Any
) -> tuple[Tensor, None]:
    """Softmax attention of the next token of each sequence, ``query [N, H, 1, K]``, to all of it: ``[N, 1, H, V]``.

    Args:
        key, value: what `KeysOfStep.put` handed on: the new token's; of latents, what became of all of them.
        attention_mask, keywords: as in `attention.attend`, without indices.

    Raises:
        UnsupportedError: a mask or a keyword not known here, or keys that are not those of the cache.
    """
    given, step = AttentionKeywords.of(keywords, "indices"), module._ring_la_rows
    mask = read_mask(module, attention_mask, given)
    if mask.chunk is not None:
        raise UnsupportedError("model", "attention that is not in chunks", mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    window = -1 if mask.window is None else mask.window - 1
    options: dict[str, Any] = dict(scale=given.scaling, softcap=given.softcap or 0.0, sinks=given.s_aux)
    rows = step.rows_of(key)
    if rows is not None:
        return rows.decode(q, k, v, window, **options), None
    if not hasattr(module, "expand_kv"):
        raise UnsupportedError("model", "attention to keys as they are in the cache", type(module).__name__)
    distance = step.lengths[:, None] - torch.arange(k.shape[1], device=k.device)
    seen = (distance >= 0) & (distance <= (window if window >= 0 else k.shape[1]))
    return one_query(q, k, v, seen[:, None, None], **options), None


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
        self._step, self._padded = KeysOfStep(), set()
        for module in model.modules():
            module._ring_la_rows = self._step  # type: ignore[assignment]
            if hasattr(module, "expand_kv") and caches_latents(type(module)):  # type: ignore[arg-type]
                self._padded.add(module.layer_idx)
        out = self._call(torch.zeros(1, 1, dtype=torch.int64, device=model.device), None, None)
        if not isinstance(out[self.name], (DynamicCache, MiniMaxCache)):
            raise UnsupportedError("model", "one with a cache of the library", type(out[self.name]).__name__)
        self._of_minimax = isinstance(out[self.name], MiniMaxCache)
        self._slots = _slots(out[self.name])

    def read(self, ids: Tensor, states: Sequence[Any] | None) -> Prefilled:
        """Read ``ids [N, T]`` after what `states` have of as many sequences of one length (none are written to)."""
        if states is None:
            cache, positions = self._empty(), None
        else:
            cache, length = self._cache(states, own=False), _length(states)
            at = None if length is None else torch.arange(length, length + ids.shape[1], device=ids.device)
            positions = None if at is None else at[None].expand(len(ids), -1)
        if self._split is None or not self.goes_on:
            out = self._call(ids, cache, positions)
        else:
            with self._split.current.going_on():
                out = self._call(ids, cache, positions)
        return Prefilled(out.logits[:, -1], self._taken(cache))

    def step(self, tokens: Tensor, states: Sequence[Any], in_place: bool) -> Prefilled:
        """Read one more token of each sequence, ``tokens [N]``; keys in `KVRows` are written there.

        in_place: states of one size are written over those given.
        """
        rows = next((state for state in states if isinstance(state, KVRows)), None)
        cache = self._cache(states, own=in_place)
        if rows is None:
            length = _length(states)
            positions = None if length is None else torch.full_like(tokens[:, None], length)
            out = self._call(tokens[:, None], cache, positions)
            return Prefilled(out.logits[:, -1], self._taken(cache))
        self._step.lengths = rows.length
        try:
            with self._names.in_whole_calls(ROWS):
                out = self._call(tokens[:, None], cache, rows.length[:, None])
        finally:
            self._step.clear()
        after = [old if isinstance(old, KVRows) else new for old, new in zip(states, self._taken(cache))]
        return Prefilled(out.logits[:, -1], after)

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
        for slot, state in zip(self._slots, states, strict=True):
            while len(cache.layers) <= slot.layer:
                cache.layers.append(cache_utils.DynamicLayer())
            layer: Any = cache.layers[slot.layer]
            if isinstance(state, KVRows):
                layer.update = functools.partial(self._step.put, state, slot.layer in self._padded)
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
                nothing = torch.zeros(1, dtype=self.model.dtype, device=self.model.device).expand(1, 1, length, 1)
                _put_keys(layer, nothing, nothing)
        return cache

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
    """Tokens of the longest sequence."""
    rows = next((state for state in states if isinstance(state, KVRows)), None)
    return (_length(states) or 0) if rows is None else max(rows.seats.lengths)
