"""Prefill: from what each rank's tokens leave in a cache, the cache one process would have, or this rank's part of it;
and the tokens after that, split in the same way, which find what is in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ...comm import Group
from ...context import ShardedLayout
from ...errors import UnsupportedError
from ...keystore import LayerKeys
from .kept_keys import KeptKeys
from .names import CACHE


class Listed(NamedTuple):
    """Where a layer's state is in a cache that is a list of tensors ``[B, D, layers]``, which the library writes to.

    Attributes:
        layer: its number. place: in the list. layers, places: how many there are.
    """

    layer: int
    place: int
    layers: int
    places: int

    def get(self, cache: Any) -> Tensor | None:
        """The state ``[B, D]`` there, of earlier tokens; None: there are none."""
        return cache.get_listed(self) if isinstance(cache, CacheRecorder) else cache[self.place][..., self.layer]

    def put(self, cache: Any, state: Tensor) -> None:
        """Write a state ``[B, D]`` there; a list may be empty."""
        if isinstance(cache, CacheRecorder):
            cache.put_listed(self, state)
            return
        if not cache:
            cache += [None] * self.places
        if cache[self.place] is None:
            cache[self.place] = state.new_zeros(*state.shape, self.layers)
        cache[self.place][..., self.layer] = state


class CacheRecorder(Cache):
    """An empty cache that keeps what layers put into it, to be put into a real one with the tokens of all ranks."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.records: list[tuple[str, tuple[Tensor, ...], tuple, dict]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args, **keywords) -> tuple[Tensor, Tensor]:
        """Keep this rank's keys and values ``[B, H, T_local, D]``."""
        self.records.append(("update", (key_states, value_states), args, keywords))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, *args, **keywords) -> Tensor:
        """Keep an indexer's keys ``[B, T_local, D]``."""
        self.records.append(("update_indexer", (indexer_key_states,), args, keywords))
        return indexer_key_states

    def update_conv_state(self, conv_states: Tensor, *args, **keywords) -> Tensor:
        """Keep the inputs of a convolution ``[B, D, T_local]``."""
        self.records.append(("update_conv_state", (conv_states,), args, keywords))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args, **keywords) -> Tensor:
        """Keep a recurrence's final state, which every rank has."""
        self.records.append(("update_recurrent_state", (recurrent_states,), args, keywords))
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """There is no earlier state."""
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep MiniMax's final state, which every rank has."""
        self.records.append(("set_linear_cache", (), (layer_idx, linear_cache), {}))

    def put_listed(self, listed: Listed, state: Tensor) -> None:
        """Keep one layer's part of a list of states, which every rank has."""
        self.records.append(("put_listed", (state,), (listed,), {}))

    def get_listed(self, listed: Listed) -> Tensor | None:
        """There is no earlier state."""
        return None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """There is no earlier state."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """There is no earlier state."""
        return None

    def has_previous_state(self, *args, **keywords) -> bool:
        """There is no earlier state."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is to be taken back."""
        return False

    def new_cache(self, config: PreTrainedConfig) -> Any:
        """An empty cache of the kind the layers wrote to."""
        if any(name == "put_listed" for name, *_ in self.records):
            return []
        if any(name == "set_linear_cache" for name, *_ in self.records):
            return MiniMaxCache()
        return DynamicCache(config=config)

    def replay(self, cache: Any, layout: ShardedLayout) -> None:
        """Put everything into `cache` as one process would have, or as it is into a `RankCache`. Collective.

        Keys of a cache with `KeptKeys`, as its attribute `kept`, are put there.
        """
        if isinstance(cache, RankCache):
            cache.take(self.records, layout)
            return
        kept: KeptKeys | None = getattr(cache, "kept", None)
        for name, tensors, args, keywords in self.records:
            if name == "put_listed":
                args[0].put(cache, *tensors)
                continue
            if name == "update" and kept is not None:
                k, v = tensors
                kept.take(_layer_of(args, keywords), k, v, layout)
                continue
            if name in ("update", "update_indexer"):
                tensors = tuple(layout.gather(t, dim=-2) for t in tensors)
            elif name == "update_conv_state":
                width = keywords.get("conv_kernel_size") or tensors[0].shape[-1]
                tensors = (_last(tensors[0], min(width, layout.seq_len), layout, layout.cp.comm),)
            getattr(cache, name)(*tensors, *args, **keywords)


class Remembered(NamedTuple):
    """What one layer remembers: one tensor, and what it is.

    Attributes:
        layer: the layer's number in the model. kind: "key", "value", "convolution" or "recurrent". place: which of
            several of that kind.
        tensor: keys and values of this rank's tokens ``[B, H, T_local, D]``; the inputs of a convolution at the last
            tokens ``[B, D, W]``, or a recurrence's final state, which are the same on every rank.
    """

    layer: int
    kind: str
    place: int
    tensor: Tensor


class RankCache(Cache):
    """An empty cache to give to a first, split call: keys and values stay on the rank that read them.

        cache = RankCache()
        model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        for entry in cache.entries: ...

    Nothing can be read on from it here; it is what another engine is given.

    Attributes:
        entries: what the layers remember, in their order. layout: the tokens of keys and values; None: not filled yet.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.entries: list[Remembered] = []
        self.layout: ShardedLayout | None = None

    def take(self, records: list[tuple[str, tuple[Tensor, ...], tuple, dict]], layout: ShardedLayout) -> None:
        """What a `CacheRecorder` has kept. Collective.

        Raises:
            UnsupportedError: keys of an indexer, for which no other engine has a place.
        """
        self.layout = layout
        for name, tensors, args, keywords in records:
            layer = _layer_of(args, keywords)
            place = keywords.get("state_idx", 0)
            if name == "update":
                self.entries += [Remembered(layer, kind, 0, x) for kind, x in zip(("key", "value"), tensors)]
            elif name == "update_conv_state":
                width = keywords.get("conv_kernel_size") or tensors[0].shape[-1]
                last = _last(tensors[0], min(width, layout.seq_len), layout, layout.cp.comm)
                self.entries.append(Remembered(layer, "convolution", place, last))
            elif name == "update_recurrent_state":
                self.entries.append(Remembered(layer, "recurrent", place, tensors[0]))
            elif name == "set_linear_cache":
                self.entries.append(Remembered(layer, "recurrent", 0, args[1]))
            elif name == "put_listed":
                self.entries.append(Remembered(args[0].layer, "recurrent", args[0].place, tensors[0]))
            else:
                raise UnsupportedError(CACHE, "a RankCache for models without an indexer", name)


class Earlier:
    """What is before the tokens of a call, for functions that are not told: of the layer that asked its cache last."""

    _tail: Tensor | None = None
    _states: list[Tensor]

    def know(self, tail: Tensor | None, state: Tensor | None) -> None:
        """A layer's inputs of its convolution, and its recurrence's state ``[B, …]``, one of several heads
        ``[B, heads, …]`` that are scanned one after the other."""
        self._tail = tail
        self._states = [] if state is None else list(state.unbind(1)) if state.dim() == 4 else [state]

    def tail(self, width: int) -> Tensor | None:
        """The last `width` inputs ``[B, D, width]`` of the convolution whose inputs were recorded last, once."""
        tail, self._tail = self._tail, None
        return None if tail is None else tail[..., tail.shape[-1] - width :]

    def state(self) -> Tensor | None:
        """The state ``[B, D, K]`` of a selective scan, once; of several heads the next one's."""
        return self._states.pop(0) if self._states else None


class WatchedCache(Earlier):
    """A cache of the library's in a call that is not split. It puts a convolution's earlier inputs before the new ones
    by itself; what the library's selective scans do not go on from is asked for here.

    Args:
        cache: what is watched from now on.
    """

    def __init__(self, cache: Cache) -> None:
        update: Any = cache.update_conv_state
        self._states = []

        def watched(conv_states: Tensor, layer_idx: int, state_idx: int = 0, **keywords) -> Tensor:
            self.know(None, cache.get_recurrent_state(layer_idx, state_idx))
            return update(conv_states, layer_idx, state_idx=state_idx, **keywords)

        cache.update_conv_state = watched  # type: ignore[method-assign]


class ContinuedRecorder(Earlier, CacheRecorder):
    """A recorder whose layers find what an earlier call left in a cache.

    Keys stay where they are: the attention function asks for those before the ones it is given. So does a convolution
    for the inputs before its own.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self._cache, self._states = cache, []
        if not hasattr(cache, "get_conv_state"):  # then mixers look into a layer themselves
            self.layers = getattr(cache, "layers", [])

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **keywords) -> Tensor:
        self.know(self.get_conv_state(layer_idx, state_idx), self.get_recurrent_state(layer_idx, state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **keywords)

    def get_linear_cache(self, layer_idx: int) -> Tensor:
        return self._cache.get_linear_cache(layer_idx)

    def get_listed(self, listed: Listed) -> Tensor | None:
        return listed.get(self._cache)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if hasattr(self._cache, "get_conv_state"):
            return self._cache.get_conv_state(layer_idx, state_idx)
        return self._layer(layer_idx).conv_states[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if hasattr(self._cache, "get_recurrent_state"):
            return self._cache.get_recurrent_state(layer_idx, state_idx)
        return self._layer(layer_idx).recurrent_states[state_idx]

    def _layer(self, number: int) -> Any:
        return self._cache.layers[number]

    def has_previous_state(self, *args, **keywords) -> bool:
        return self._cache.has_previous_state(*args, **keywords)

    def keys_before(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, S, D]`` that stand before those recorded as `key`.

        Raises:
            UnsupportedError: they are not what was recorded.
        """
        layer = self._layer(self._recorded(key))
        return layer.keys, layer.values

    def kept_before(self, key: Tensor) -> LayerKeys | None:
        """What stays on its ranks of the tokens before those recorded as `key`; None: every rank has it all.

        Raises:
            UnsupportedError: they are not what was recorded.
        """
        kept: KeptKeys | None = getattr(self._cache, "kept", None)
        return None if kept is None else kept.before(self._recorded(key))

    def _recorded(self, key: Tensor) -> int:
        """The layer that recorded this key."""
        for name, tensors, args, keywords in reversed(self.records):
            if name == "update" and tensors[0] is key:
                return _layer_of(args, keywords)
        raise UnsupportedError(CACHE, "keys that go into the cache as they are attended to", "others")


def _layer_of(args: tuple, keywords: dict) -> int:
    """The layer's number in what an ``update`` was given."""
    return args[0] if args else keywords["layer_idx"]


def _last(x: Tensor, width: int, layout: ShardedLayout, group: Group) -> Tensor:
    """The last `width` tokens of the sequence ``[B, D, width]`` on every rank, from ``[B, D, T_local]``."""
    place = layout.tokens().to(x.device) - (layout.seq_len - width)
    mine = (place >= 0).nonzero().flatten()
    out = x.new_zeros(*x.shape[:-1], width).index_copy(-1, place[mine], x[..., mine])
    return group.all_reduce(out).wait()
