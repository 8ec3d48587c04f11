"""The next token of sequences that are decoded side by side: its attention, its experts.

While a model of Transformers takes a step, its attention layers hand on the new token's keys alone, and the attention
function `attend_rows` finds the memory these belong to: `KVRows`; `LayerKeys` where keys stay on the ranks that read
them, which decode together; or `StaticKeys` where a step has to do the same for all values, as a CUDA graph does. In
the last two latents are attended to as they are: a query goes into their space and its result comes back (the absorbed
form, DeepSeek-V2, arXiv 2405.04434, §2.1.2), so nothing is expanded but the new token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...errors import UnsupportedError
from ...keystore import LayerKeys, decode_attention
from ...keystore.static import StaticKeys
from ...nn.decoding import KVRows, one_query
from .attention import AttentionKeywords, read_mask
from .experts import chosen_experts, is_experts
from .masks import CausalMask

ROWS = "ring_la_rows"
"""The name of `attend_rows` in the registries of attention and mask functions."""
EXPERTS = "ring_la_step"
"""The name of `experts_of_step` in the registry of experts' functions."""


Memory: TypeAlias = KVRows | StaticKeys | LayerKeys
"""Where the keys of a layer's sequences are."""


class KeysOfStep:
    """The keys of a step under way, which a model's modules find as ``_ring_la_rows``."""

    def __init__(self) -> None:
        self.lengths: Tensor | None = None
        self.fixed = False  # whether memory has fixed addresses
        self._put: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the rows, by the new keys
        self._latents: dict[int, tuple[StaticKeys | LayerKeys, Tensor, Tensor]] = {}  # by layer

    def put(self, rows: Memory, padded: bool, k: Tensor, v: Tensor, *at: Any, **keywords: Any) -> Any:
        """In place of a cache layer's ``update``: the new token's ``[N, H, 1, D]`` as they are; `padded`: all tokens'
        of all sequences, padded to the longest."""
        if not padded:
            self._put[k] = rows
            return k, v
        assert isinstance(rows, KVRows)  # of others latents are put
        written = zip(*rows.written(k.transpose(1, 2), v.transpose(1, 2)))
        keys, values = (pad_sequence(list(x), batch_first=True).transpose(1, 2) for x in written)
        return keys, values

    def put_latents(self, layer: int, rows: StaticKeys | LayerKeys, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        """The same of a layer whose module finds its latents here: they are handed on for their shape's sake."""
        self._latents[layer] = rows, k, v
        return k, v

    def rows_of(self, key: Tensor) -> Memory | None:
        """The rows whose new keys these are."""
        return self._put.get(key)

    def latents_of(self, module: Any) -> tuple[StaticKeys | LayerKeys, Tensor, Tensor] | None:
        """Memory, latent and rotary key ``[N, 1, 1, ·]`` of a module's new token."""
        return self._latents.get(getattr(module, "layer_idx", -1))

    def clear(self) -> None:
        self.lengths, self.fixed = None, False
        self._put.clear()
        self._latents.clear()


def attend_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: CausalMask, **keywords: Any
) -> tuple[Tensor, None]:
    """Softmax attention of the next token of each sequence, ``query [N, H, 1, K]``, to all of it: ``[N, 1, H, V]``.

    Args:
        key, value: what `KeysOfStep` handed on: the new token's; of latents, what became of those.
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
    rows, latents = step.rows_of(key), step.latents_of(module)
    if isinstance(rows, LayerKeys):
        rows.put(k, v)
        return decode_attention(q, rows, window=window, **options).o, None
    if rows is not None:
        return rows.decode(q, k, v, window, **options), None
    if latents is not None:
        return _attend_latents(module, q, latents, window, options), None
    if not hasattr(module, "expand_kv"):
        raise UnsupportedError("model", "attention to keys as they are in the cache", type(module).__name__)
    distance = step.lengths[:, None] - torch.arange(k.shape[1], device=k.device)
    seen = (distance >= 0) & (distance <= (window if window >= 0 else k.shape[1]))
    return one_query(q, k, v, seen[:, None, None], **options), None


def _attend_latents(
    module: Any, q: Tensor, put: tuple[StaticKeys | LayerKeys, Tensor, Tensor], window: int, options: dict[str, Any]
) -> Tensor:
    """Of ``q [N, 1, H, K]``, whose first channels meet what the latents become, and the last ones the rotary keys."""
    keys, latent, rotary = put
    K, V = module.qk_nope_head_dim, module.v_head_dim
    w_uk, w_uv = module.kv_b_proj.weight.unflatten(0, (-1, K + V)).split([K, V], 1)  # [H, ·, L]
    plain, turned = q[:, 0].split([K, q.shape[-1] - K], -1)
    inside = torch.bmm(plain.transpose(0, 1), w_uk).transpose(0, 1)[:, None]  # [N, 1, H, L]
    k, r = (x.transpose(1, 2) for x in (latent, rotary))
    scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    if isinstance(keys, LayerKeys):
        keys.put(k, r)
        whole = torch.cat([inside, turned[:, None]], -1)
        o = decode_attention(whole, keys.joined(), window=window, **(options | {"scale": scale})).o
    else:
        o = keys.decode_latents(inside, turned[:, None], k, r, window, **(options | {"scale": scale}))
    return torch.bmm(o[:, 0].transpose(0, 1), w_uv.mT).transpose(0, 1)[:, None]


def experts_of_step(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A mixture's experts on a token of each sequence: those chosen alone are read, and the host asks for nothing."""
    rows, chosen = hidden_states.reshape(-1, hidden_states.shape[-1]), top_k_index.reshape(-1, top_k_index.shape[-1])
    out = chosen_experts(module, rows, chosen, top_k_weights, module.down_proj.shape[0])
    return out.view(*chosen.shape, -1).sum(1).to(rows.dtype).view(hidden_states.shape)


class ExpertNames:
    """Which function of experts a model's configurations name.

    Args:
        model: whose experts may be of any class; what has experts of its own way keeps it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_of_step)
        found = (getattr(module, "config", None) for module in model.modules() if is_experts(module))
        configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
        self._own: list[tuple[Any, Any]] = [(c, c._experts_implementation) for c in configs.values()]

    @contextmanager
    def in_steps(self) -> Iterator[None]:
        """Experts are those of steps."""
        for config, _ in self._own:
            config._experts_implementation_internal = EXPERTS
        try:
            yield
        finally:
            for config, name in self._own:
                config._experts_implementation_internal = name
