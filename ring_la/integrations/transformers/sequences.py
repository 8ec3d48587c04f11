"""What a model of Transformers remembers of sequences, as rows: read on, decoded side by side, joined and kept.

A cache of the library holds one batch of one length, and grows by being copied. Here it is a list of states like those
of a `HybridLM`: keys and values (`KVCache`; `KVRows` while sequences of any lengths are decoded side by side;
`LayerKeys` where `Sequences.share` has them stay on the ranks that read them), and states of recurrences and tails of
convolutions (`LayerState`), each with a row a sequence. For a call they are put into a cache of the library, whose
layers keep all keys. What a step does with keys is in `next_token`; over states at fixed addresses (`StaticKeys`) it is
the same for all values.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicCache

from ...context import ContextParallel
from ...errors import UnsupportedError
from ...inference import Prefilled
from ...keystore import KeyRows, KeySize, KeyStore, LayerKeys, rows_of, with_rows
from ...keystore.static import StaticKeys
from ...nn import KVCache, LayerState
from ...nn.decoding import KVRows
from .attention import AttentionNames
from .cache import WatchedCache
from .call import Current, ModelCall
from .kept_keys import KeptKeys
from .masks import make_mask
from .mixers import goes_on, make_forward, number_layers, ours_with_cache, scans
from .mixers.indexed import is_matrix
from .mixers.latents import caches_latents
from .names import cache_name
from .next_token import ROWS, ExpertNames, KeysOfStep, attend_rows
from .slots import kind_of, put_keys
from .step_parts import shorten

MEMORY = (KVRows, StaticKeys, LayerKeys)
"""States that a step writes to where they are."""


def go_on_alone(model: PreTrainedModel) -> Current:
    """Give a model that is not split our mixers where the library's do not go on from a cache; the call they find."""
    current: Current | None = getattr(model, "_ring_la_alone", None)
    if current is None:
        current = model._ring_la_alone = Current()  # type: ignore[assignment]
    number_layers(model)
    for module in model.modules():
        if (scans(module) or ours_with_cache(module)) and "forward" not in vars(module):
            module.forward = types.MethodType(make_forward(module, current), module)
    return current


class Sequences:
    """A model of Transformers whose sequences are rows. Collective where it is parallelized; `step` is so only where
    keys stay on their ranks.

    Args:
        model: its attention goes through the library's attention and mask functions, or its cache has states alone.

    Attributes:
        goes_on: whether tokens after others are split over the ranks, too, where the model is parallelized.
        sizes: what a token takes in layers that keep keys, by the number of their state. keys: where these stay on the
            ranks that read them; None: they are whole on every rank.

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
        self.name = cache_name(model.forward)
        self._step, self._experts = KeysOfStep(), ExpertNames(model)
        self._alone = go_on_alone(model) if self._split is None else Current()
        self._scans = any(scans(module) for module in model.modules())
        self._latents: dict[int, bool] = {}  # layers that have them, and whether one matrix says what they become
        for module in model.modules():
            module._ring_la_rows = self._step  # type: ignore[assignment]
            if hasattr(module, "expand_kv") and caches_latents(type(module)):
                self._latents[int(module.layer_idx)] = is_matrix(module.kv_b_proj)  # type: ignore[arg-type]
        self._short = False
        cache = self._first_cache()
        self._kind = kind_of(cache)
        self._slots = self._kind.slots(cache)
        layers = {i: cache.layers[slot.layer] for i, slot in enumerate(self._slots) if slot.state is None}
        self.sizes = {i: KeySize(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for i, x in layers.items()}
        self._dtypes = {x.dtype for layer in layers.values() for x in (layer.keys, layer.values)}
        self.keys: KeyStore | None = None

    def share(self, cp: ContextParallel | None) -> None:
        """Keys stay on the ranks that read them from now on; None: every rank has all.

        Raises:
            UnsupportedError: not those of this model.
        """
        self.keys = None
        if cp is None:
            return
        if not all(self._latents.values()):
            raise UnsupportedError("model", "latents that one matrix expands", "others")
        if len(self._dtypes) > 1:
            raise UnsupportedError("model", "keys of one dtype", sorted(map(str, self._dtypes)))
        [dtype] = self._dtypes
        self.keys = KeyStore(list(self.sizes.values()), cp, dtype=dtype, device=self.model.device)

    def read(self, ids: Tensor, states: Sequence[Any] | None) -> Prefilled:
        """Read ``ids [N, T]`` after what `states` have of as many sequences of one length (none are written to)."""
        by_steps = self._split is not None and (self._scans or self.keys is not None)
        if states is not None and by_steps and not self._is_split(ids):
            for token in ids.unbind(1):  # so few that no rank has two
                out = self.step(token, states, in_place=False)
                states = out.states
            return out
        rows = None if states is None else rows_of(states)
        if states is None:
            cache, positions = self._kind.empty(self.model.config), None
        else:
            rows = None if rows is None else rows.chosen(range(len(rows)))  # all of their tokens are earlier ones
            states = states if rows is None else with_rows(states, rows)
            cache, length = self._cache(states, own=False), _length(states)
            at = None if length is None else torch.arange(length, length + ids.shape[1], device=ids.device)
            positions = None if at is None else at[None].expand(len(ids), -1)
        kept = self._kept(cache, rows)
        with self._going_on(cache, states is not None):
            out = self._call(ids, cache, positions)
        return Prefilled(out.logits[:, -1], self._taken(out[self.name] if cache is None else cache, kept))

    def step(self, tokens: Tensor, states: Sequence[Any], in_place: bool) -> Prefilled:
        """Read one more token of each sequence, ``tokens [N]``; keys in `KVRows` or `StaticKeys` are written there.
        Collective where keys stay on their ranks.

        in_place: states of one size are written over those given.
        """
        shared = rows_of(states)
        states = states if shared is None else with_rows(states, shared.advanced(in_place))
        rows = next((state for state in states if isinstance(state, MEMORY)), None)
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
        after = [old if isinstance(old, MEMORY) else new for old, new in zip(states, self._taken(cache))]
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
    def _call(self, ids: Tensor, cache: Any, positions: Tensor | None) -> Any:
        """The model on tokens after those of a cache."""
        keywords: dict[str, Any] = {self.name: cache}
        if positions is not None and "position_ids" in self._takes:
            keywords["position_ids"] = positions
        if self._split is not None or "logits_to_keep" in self._takes:
            keywords["logits_to_keep"] = 1
        return self.model(input_ids=ids, use_cache=True, **keywords)

    def _first_cache(self) -> Any:
        """What the model has as a cache of one token."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        cache = self._call(ids, None, None).get(self.name)
        if cache is None and self.name in self._takes:  # it makes one and forgets it
            cache = DynamicCache(config=self.model.config)
            self._call(ids, cache, None)
        return cache

    # -- between a cache and states ------------------------------------------------------------------------

    def _cache(self, states: Sequence[Any], own: bool) -> Any:
        """A cache that has these states; `own`: it may write to them."""
        cache, length = self._kind.empty(self.model.config), _longest(states)
        cache = [] if cache is None else cache
        nothing = torch.zeros(1, dtype=self.model.dtype, device=self.model.device)
        layers = getattr(cache, "layers", [])
        for slot, state in zip(self._slots, states, strict=True):
            if isinstance(state, LayerState):
                parts = (x if x is None or own else x.clone() for x in (state.recurrent, state.tail))
                self._kind.put(cache, slot, *parts)
                continue
            while len(layers) <= slot.layer:
                layers.append(cache_utils.DynamicLayer())
            layer: Any = layers[slot.layer]
            if isinstance(state, KVRows):
                layer.update = functools.partial(self._step.put, state, slot.layer in self._latents)
            elif isinstance(state, (StaticKeys, LayerKeys)):
                layer.update = self._update_of(slot.layer, state)
            else:
                put_keys(layer, state.k.transpose(1, 2), state.v.transpose(1, 2))
        for layer in layers:  # that are asked how many tokens there are
            if length and not getattr(layer, "is_initialized", True):
                put_keys(layer, *[nothing.expand(1, 1, length, 1)] * 2)
        return cache

    def _update_of(self, layer: int, keys: StaticKeys | LayerKeys) -> Callable[..., Any]:
        """What takes a layer's new keys where they have fixed addresses, or stay on their ranks."""
        if layer not in self._latents:
            return functools.partial(self._step.put, keys, False)
        if not self._latents[layer]:
            raise UnsupportedError("capture", "False for latents that more than one matrix expands", f"layer {layer}")
        return functools.partial(self._step.put_latents, layer, keys)

    def _kept(self, cache: Any, before: KeyRows | None) -> KeptKeys | None:
        """Where a call's keys go that stay on their ranks, after those of these sequences."""
        if self.keys is None:
            return None
        layers = {self._slots[i].layer: n for n, i in enumerate(self.sizes)}
        cache.kept = KeptKeys(self.keys, layers, before)
        return cache.kept

    def _taken(self, cache: Any, kept: KeptKeys | None = None) -> list[Any]:
        """What a cache has, `kept` of it in its own place."""
        if kept is not None and kept.after is None:  # a prompt that every rank has read
            for i in self.sizes:
                layer = cache.layers[self._slots[i].layer]
                kept.take(self._slots[i].layer, layer.keys, layer.values, None)
        keys = iter(range(len(self.sizes)))
        states: list[Any] = []
        for slot in self._slots:
            if slot.state is not None:
                states.append(self._kind.taken(cache, slot))
            elif kept is not None and kept.after is not None:
                states.append(kept.after[next(keys)])
            else:
                layer = cache.layers[slot.layer]
                states.append(KVCache(layer.keys.transpose(1, 2), layer.values.transpose(1, 2), None))
        return states


def _length(states: Sequence[Any]) -> int | None:
    """Tokens of sequences of one length; None: the states do not say, and no layer needs to know."""
    if (shared := rows_of(states)) is not None:
        return shared.earlier[0]
    return next((state.k.shape[1] for state in states if isinstance(state, KVCache)), None)


def _longest(states: Sequence[Any]) -> int:
    """Tokens of the longest sequence; of fixed addresses, what there is room for in a step."""
    fixed = next((state for state in states if isinstance(state, StaticKeys)), None)
    if fixed is not None:
        return fixed.rows.columns
    if (shared := rows_of(states)) is not None:
        return max(shared.earlier)
    rows = next((state for state in states if isinstance(state, KVRows)), None)
    return (_length(states) or 0) if rows is None else max(rows.seats.lengths)
