"""Qwen4-Exp's n-grams: embeddings of each token's id with those before it, and a dilated convolution over them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ....conv import behind, short_conv
from ..call import ModelCall
from ..names import takes_cache
from .indexed import Overriding


@takes_cache
def ngram_embedding(call: ModelCall, layer: Any, input_ids: Tensor, cache: Any = None) -> Tensor:
    """``Qwen4ExpTextNGramEmbedding``: the ids before this rank's tokens come from their owner."""
    documents = input_ids.shape[0]
    if call.layout is None or call.layout.packed:
        documents = len(call.cu_seqlens if call.layout is None else call.layout.cu_seqlens) - 1
    before = input_ids.new_full((documents, layer.context_len, 1), layer.eos_token_id)
    ids = behind(input_ids[..., None], layer.context_len, before, call.layout, call.cu_seqlens)
    out = inspect.unwrap(type(layer).forward)(layer, ids.rows[..., 0], None)
    return out.index_select(1, ids.token + ids.width)


def ple_layer(call: ModelCall, layer: Any, *args, **keywords) -> Tensor:
    """``Qwen4ExpTextPLELayer``: the dilated convolution is a longer one, with zeros between its taps."""

    def convolve(hidden_states: Tensor, *_: object) -> Tensor:
        weight, dilation = layer.conv1d.weight[:, 0], layer.conv1d.dilation[0]
        taps = torch.arange(weight.shape[1], device=weight.device) * dilation
        spread = weight.new_zeros(weight.shape[0], int(dilation) * (weight.shape[1] - 1) + 1)
        return short_conv(hidden_states, spread.index_copy(1, taps, weight), None, "silu", **call.split).o

    return Overriding(layer, _short_conv=convolve).forward(*args, **keywords)


MIXERS = {"Qwen4ExpTextNGramEmbedding": ngram_embedding, "Qwen4ExpTextPLELayer": ple_layer}
UNCACHED = {"Qwen4ExpTextNGramEmbedding"}
