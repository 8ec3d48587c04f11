"""Prefill: from what each rank's tokens leave in a cache, the cache one process would have."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ...comm import Group
from ...context import ShardedLayout


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

    def get_linear_cache(self, layer_idx: int) -> None:
        """There is no earlier state."""

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep MiniMax's final state, which every rank has."""
        self.records.append(("set_linear_cache", (), (layer_idx, linear_cache), {}))

    def get_conv_state(self, *args, **keywords) -> None:
        """There is no earlier state."""

    def get_recurrent_state(self, *args, **keywords) -> None:
        """There is no earlier state."""

    def has_previous_state(self, *args, **keywords) -> bool:
        """There is no earlier state."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is to be taken back."""
        return False

    def new_cache(self, config: PreTrainedConfig) -> Cache:
        """An empty cache of the kind the layers wrote to."""
        if any(name == "set_linear_cache" for name, *_ in self.records):
            return MiniMaxCache()
        return DynamicCache(config=config)

    def replay(self, cache: Cache, layout: ShardedLayout) -> None:
        """Put everything into `cache` as one process would have. Collective."""
        for name, tensors, args, keywords in self.records:
            if name in ("update", "update_indexer"):
                tensors = tuple(layout.gather(t, dim=-2) for t in tensors)
            elif name == "update_conv_state":
                width = keywords.get("conv_kernel_size") or tensors[0].shape[-1]
                tensors = (_last(tensors[0], min(width, layout.seq_len), layout, layout.cp.comm),)
            getattr(cache, name)(*tensors, *args, **keywords)


def _last(x: Tensor, width: int, layout: ShardedLayout, group: Group) -> Tensor:
    """The last `width` tokens of the sequence ``[B, D, width]`` on every rank, from ``[B, D, T_local]``."""
    place = layout.tokens().to(x.device) - (layout.seq_len - width)
    mine = (place >= 0).nonzero().flatten()
    out = x.new_zeros(*x.shape[:-1], width).index_copy(-1, place[mine], x[..., mine])
    return group.all_reduce(out).wait()
