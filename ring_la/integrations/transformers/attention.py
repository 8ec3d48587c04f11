"""The attention function that models find under the name "ring_la", and which of them their configurations name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedError
from ...keystore import LayerKeys, with_earlier, with_earlier_latents
from ...outputs import AttentionOutput
from ...softmax import attention, mla, sparse_attention
from ...softmax.merging import Partial
from .masks import CausalMask, mask_of
from .names import CACHE

NAME = "ring_la"
"""The name in the registries of attention and mask functions."""

EARLIER = 32768
"""Latents of earlier tokens of which keys and values exist at once."""

HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "is_causal",
    "labels",
    "layer_idx",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "seq_idx",
    "target_dtype",
    "use_cache",
}
"""Keywords of other attention functions that do not change the result, or say what `CausalMask` and the layout say."""


@dataclass(frozen=True)
class AttentionKeywords:
    """What the library gives an attention function by name.

    Attributes:
        s_aux: attention sinks ``[H]``. sliding_window: must be what the mask says.
        indices: places of the keys each query reads, ``[B, T, S]``; None: all of them.
        others: what else came.
    """

    dropout: float = 0.0
    scaling: float | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    sliding_window: int | None = None
    indices: Tensor | None = None
    others: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], *unknown: str) -> AttentionKeywords:
        """Those of a call; what the function does not know, `unknown`, is among the others."""
        known = KEYWORDS.difference(unknown)
        own = {name: value for name, value in given.items() if name in known}
        return cls(**own, others={name: value for name, value in given.items() if name not in known})


KEYWORDS = frozenset(f.name for f in fields(AttentionKeywords)) - {"others"}
"""Those that have a name here; as a constant, for compilers do not trace `fields`."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: CausalMask, **keywords: Any
) -> tuple[Tensor, None]:
    """Softmax attention of this rank's queries with the keys of the whole sequence.

    Args:
        query: ``[B, H, T, K]``. key, value: ``[B, Hk, T, ·]``. attention_mask: what the mask registry returned.
        keywords: see `AttentionKeywords`.

    Returns:
        ``[B, T, H, V]``, and no weights.

    Raises:
        UnsupportedError: a mask or a keyword not known here.
    """
    given = AttentionKeywords.of(keywords)
    tensors = tuple(x.transpose(1, 2) for x in (query, key, value))
    ours: dict[str, Any] = {"scale": given.scaling, "sinks": given.s_aux}
    if given.indices is not None:
        refuse_narrow_keys(module)
        ours["chosen"] = _choice(given)
        return _run(sparse_attention, tensors, module, attention_mask, given, ours), None
    ours |= {"softcap": given.softcap or 0.0, "dropout_p": given.dropout} | asked_of_attention(module)
    kept = _kept_before(module, key)
    if kept is not None:
        return _after_kept(tensors, module, attention_mask, given, ours, kept), None
    ours |= _before(module, key)
    return _run(attention, tensors, module, attention_mask, given, ours), None


def attend_latents(
    module: Any, query: Tensor, latent: Tensor, k_rope: Tensor, attention_mask: CausalMask, **keywords: Any
) -> tuple[Tensor, None]:
    """The same where keys are latents ``[B, 1, T, L]`` with rotary parts ``[B, 1, T, R]``; the module's ``kv_b_proj``
    says what they become."""
    given = AttentionKeywords.of(keywords, "softcap")
    N, V = module.qk_nope_head_dim, module.v_head_dim
    w_uk, w_uv = module.kv_b_proj.weight.unflatten(0, (-1, N + V)).split([N, V], 1)
    tensors = query.transpose(1, 2), latent[:, 0], k_rope[:, 0]
    ours = {"scale": given.scaling, "sinks": given.s_aux, "dropout_p": given.dropout, "w_uk": w_uk, "w_uv": w_uv}
    ours |= asked_of_attention(module)
    if given.indices is not None:
        ours["chosen"] = _choice(given)
    call = module._ring_la.call
    if call is None or call.earlier is None:
        return _run(mla, tensors, module, attention_mask, given, ours), None
    mask = read_mask(module, attention_mask, given)
    if given.indices is not None or given.s_aux is not None or mask.window is not None or mask.chunk is not None:
        raise UnsupportedError(CACHE, "an empty cache for latents with windows, sinks or indices", "a filled one")
    kept = _kept_before(module, latent)
    if kept is not None:
        new = AttentionOutput(*mla(*tensors, **(ours | call.split))[:2])
        scale = query.shape[-1] ** -0.5 if given.scaling is None else given.scaling
        return with_earlier_latents(tensors[0], new, kept.joined(), call.layout, w_uk, w_uv, scale=scale).o, None
    return _go_on(tensors, call, ours, *call.earlier.keys_before(latent)), None


def _go_on(
    tensors: tuple[Tensor, Tensor, Tensor], call: Any, ours: dict[str, Any], latent: Tensor, rotary: Tensor
) -> Tensor:
    """Latents after earlier ones ``[B, 1, S, ·]``, which every rank has: keys and values of these are made of some
    tokens at a time."""
    q, (w_uk, w_uv) = tensors[0], (ours["w_uk"], ours["w_uv"])
    B, T, H, _ = q.shape
    part = Partial((B, T, H, w_uv.shape[1]), q.dtype, q.device)
    part.add(*mla(*tensors, **(ours | call.split))[:2])
    factor = q.shape[-1] ** -0.5 if ours["scale"] is None else ours["scale"]
    for low, turned in zip(latent[:, 0].split(EARLIER, 1), rotary[:, 0].split(EARLIER, 1)):
        k = torch.einsum("btl,hdl->bthd", low, w_uk)
        k = torch.cat([k, turned[:, :, None].expand(-1, -1, H, -1)], -1)
        part.add(*attention(q, k, torch.einsum("btl,hvl->bthv", low, w_uv), causal=False, scale=factor)[:2])
    return part.result()[0]


def asked_of_attention(module: Any) -> dict[str, Any]:
    """What the caller of `parallelize` chose for attention in split calls; a probe is none."""
    split = module._ring_la
    return {} if split.call is None or split.call.layout is None else split.settings.of_attention


def refuse_narrow_keys(module: Any) -> None:
    """Refuse a narrower dtype of keys that travel for a module whose index picks them."""
    dtype = asked_of_attention(module).get("kv_comm_dtype")
    if dtype is not None:
        raise UnsupportedError("kv_comm_dtype", f"None where an index picks the keys of {_name(module)}", dtype)


def _before(module: Any, key: Tensor) -> dict[str, Any]:
    """The keys that stand before a call's, where it goes on from earlier tokens."""
    call = module._ring_la.call
    if call is None or call.earlier is None:
        return {}
    k, v = (x.transpose(1, 2) for x in call.earlier.keys_before(key))
    return {"joint_k": k, "joint_v": v, "joint": "front"}


def _kept_before(module: Any, key: Tensor) -> LayerKeys | None:
    """The same where they stay on the ranks that read them; None: they do not."""
    call = module._ring_la.call
    return call.earlier.kept_before(key) if call is not None and call.earlier is not None else None


def _after_kept(
    tensors: tuple[Tensor, ...],
    module: Any,
    mask: CausalMask,
    given: AttentionKeywords,
    ours: dict[str, Any],
    kept: LayerKeys,
) -> Tensor:
    """Attention of a call's tokens to each other and to those before them, whose keys stay where they are."""
    mask, call = read_mask(module, mask, given), module._ring_la.call
    if mask.chunk is not None:
        raise UnsupportedError(CACHE, "an empty cache for attention in chunks", "a filled one")
    q, k, v = tensors
    options: dict[str, Any] = {"window": -1 if mask.window is None else mask.window - 1, "softcap": ours["softcap"]}
    options |= {"sinks": given.s_aux, "scale": q.shape[-1] ** -0.5 if given.scaling is None else given.scaling}
    new = attention(q, k, v, **(ours | {"sinks": None, "window": (options["window"], -1)}), **call.split)
    return with_earlier(q, new, kept, call.layout, **options).o


def _choice(given: AttentionKeywords) -> Tensor:
    """Chosen keys ``[B, T, S]`` as our functions take them."""
    assert given.indices is not None
    for name, value in (("softcap", given.softcap), ("attention_dropout", given.dropout)):
        if value:
            raise UnsupportedError(name, "0 where an index picks the keys", value)
    return given.indices[:, :, None]


def _run(
    function: Callable,
    tensors: tuple[Tensor, ...],
    module: Any,
    mask: CausalMask,
    given: AttentionKeywords,
    ours: Mapping[str, Any],
) -> Tensor:
    """A function of ours of tensors of this rank's tokens, under the mask and layout of the call."""
    mask = read_mask(module, mask, given)
    call = module._ring_la.call
    if call is None:
        got = f"one of {_name(module)} or a part around it"
        raise UnsupportedError("model", "a call of the parallelized model itself", got)
    window = (-1, -1) if mask.window is None else (mask.window - 1, 0)
    if mask.chunk is None:
        return call.operator(function, *tensors, **ours, window=window).o
    if call.earlier is not None:
        raise UnsupportedError(CACHE, "an empty cache for attention in chunks", "a filled one")
    rows = zip(*(x.split(1) for x in tensors))
    return torch.cat([function(*row, **ours, window=window, **call.chunked(mask.chunk)).o for row in rows])


def _name(module: Any) -> str:
    return f"{type(module).__name__} {getattr(module, 'layer_idx', '')}".strip()


def read_mask(module: Any, attention_mask: object, given: AttentionKeywords) -> CausalMask:
    """The mask, read. Refuse one that is not ours, and keywords that are not known."""
    where, others, sliding_window = _name(module), given.others, given.sliding_window
    if not isinstance(attention_mask, CausalMask):
        got = "none" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise UnsupportedError("model", f"a mask from the library's mask functions in {where}", got)
    mask = mask_of(module, attention_mask)
    unknown = [n for n, x in others.items() if n not in HARMLESS and x is not None and x is not False]
    if unknown or others.get("is_causal") is False:
        raise UnsupportedError(
            "model", f"causal attention with known keywords in {where}", unknown or "is_causal=False"
        )
    if sliding_window is not None and sliding_window != mask.window:
        got = f"window {sliding_window} with {mask}"
        raise UnsupportedError("model", f"one window in the mask and the keywords of {where}", got)
    return mask


class AttentionNames:
    """Which attention function a model's configurations name: ours in split calls, their own in whole ones."""

    def __init__(self, model: PreTrainedModel) -> None:
        found = (getattr(module, "config", None) for module in model.modules())  # an adapter's copy has one of its own
        configs = {id(c): c for c in found if isinstance(c, PreTrainedConfig)}
        self._own = [(c, c._attn_implementation) for c in configs.values()]
        self._whole: str | None = None
        self._split = False

    def use(self, split: bool) -> None:
        """Name our function, or the one of whole calls: that the model came with, or what `in_whole_calls` says."""
        self._split = split
        for config, name in self._own:
            config._attn_implementation = NAME if split else self._whole or name

    @contextmanager
    def in_whole_calls(self, name: str) -> Iterator[None]:
        """Whole calls name this function."""
        self._whole = name
        self.use(self._split)
        try:
            yield
        finally:
            self._whole = None
            self.use(self._split)

    def check(self) -> None:
        """Refuse a call after someone else has named another function, which would see this rank's keys."""
        other = next((c._attn_implementation for c, _ in self._own if c._attn_implementation != NAME), None)
        if other is not None:
            hint = "Choose one for calls that are not split before parallelize"
            raise UnsupportedError("config._attn_implementation", repr(NAME), repr(other), hint)
