"""Softmax attention of classes that do not go through the library's registry of attention functions."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from ....errors import UnsupportedError
from ....softmax import attention
from ..attention import asked_of_attention
from ..call import ModelCall
from ..masks import CausalMask, mask_of
from ..names import takes_cache
from .indexed import Overriding


def attention_by_method(call: ModelCall, layer: Any, *args, **keywords):
    """A layer whose ``_attn(q, k, v, mask)`` takes ``[B, H, T, D]``: GPT-J, CodeGen, GPT-NeoX-Japanese, and GPT-Neo,
    which does not scale."""
    drop = getattr(layer, "attn_dropout", None) or layer.attention_dropout
    scale = 1.0 / float(getattr(layer, "scale_attn", getattr(layer, "norm_factor", 1.0)))

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None) -> tuple[Tensor, None]:
        _check_causal(layer, attention_mask)
        q, k, v = (x.transpose(1, 2).to(value.dtype) for x in (query, key, value))
        local = getattr(layer, "attention_type", None) == "local"
        window = (layer.config.window_size - 1, 0) if local else (-1, -1)
        dropout = drop.p if drop.training else 0.0
        how: dict[str, Any] = dict(scale=scale, window=window, dropout_p=dropout) | asked_of_attention(layer)
        return call.operator(attention, q, k, v, **how).o.transpose(1, 2), None

    return Overriding(layer, _attn=attend).forward(*args, **keywords)


def falcon_attention(
    call: ModelCall,
    layer: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: object,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    layer_past: Any = None,
    **_: object,
) -> tuple[Tensor, None]:
    """``FalconAttention`` with rotary positions."""
    _check_causal(layer, attention_mask)
    if alibi is not None:
        raise UnsupportedError("model", "a Falcon with rotary positions", "one with ALiBi")
    q, k, v = (x.transpose(1, 2) for x in layer._split_heads(layer.query_key_value(hidden_states)))
    rotate = inspect.unwrap(type(layer).forward).__globals__["apply_rotary_pos_emb"]
    q, k = rotate(q, k, *position_embeddings)
    if layer_past is not None:
        k, v = layer_past.update(k, v, layer.layer_idx)
    how: dict[str, Any] = dict(scale=layer.head_dim**-0.5) | asked_of_attention(layer)
    o = call.operator(attention, *(x.transpose(1, 2) for x in (q, k, v)), **how).o
    return layer.dense(o.flatten(2)), None


@takes_cache
def xglm_attention(
    call: ModelCall,
    layer: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: object = None,
    **_: object,
) -> tuple[Tensor, None]:
    """``XGLMAttention`` of a decoder without an encoder."""
    _check_causal(layer, attention_mask if key_value_states is None else "cross-attention")
    q, k, v = (
        project(hidden_states).unflatten(-1, (-1, layer.head_dim))
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if cache is not None:
        k, v = (x.transpose(1, 2) for x in (k, v))
        k, v = (x.transpose(1, 2) for x in cache.update(k, v, layer.layer_idx))
    dropout = layer.dropout if layer.training else 0.0
    how: dict[str, Any] = dict(scale=layer.scaling, dropout_p=dropout) | asked_of_attention(layer)
    return layer.out_proj(call.operator(attention, q, k, v, **how).o.flatten(2)), None


def _check_causal(layer: Any, mask: object) -> None:
    if not isinstance(mask, CausalMask) or mask_of(layer, mask) != CausalMask():
        raise UnsupportedError("model", f"the library's causal mask in {type(layer).__name__}", mask)


BY_METHOD = ("GPTJAttention", "CodeGenAttention", "GPTNeoSelfAttention", "GPTNeoXJapaneseAttention")

MIXERS = {
    **dict.fromkeys(BY_METHOD, attention_by_method),
    "FalconAttention": falcon_attention,
    "XGLMAttention": xglm_attention,
}
