"""RWKV-4: a weighted mean of values whose weights decay by channel, and token shifts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....conv import token_shift
from ....linear import CommonOptions
from ....recurrences import hgrn
from ....recurrences.stabiliser import stabiliser
from ..call import ModelCall
from .indexed import Overriding

NEVER = -1e4
"""The logarithm of no weight."""


def time_mixing(call: ModelCall, layer: Any, hidden: Tensor, state: object = None, use_cache: bool = False):
    """``RwkvSelfAttention``: its projections of shifted tokens, `wkv`, and its output projection."""
    receptance, key, value, _ = _shifting(call, layer).extract_key_value(hidden)
    return layer.output(receptance * wkv(call, layer.time_decay, layer.time_first, key, value)), state


def channel_mixing(call: ModelCall, layer: Any, hidden: Tensor, state: object = None):
    """``RwkvFeedForward``, which looks at the token before."""
    return _shifting(call, layer).forward(hidden)[0], state


def wkv(call: ModelCall, decay: Tensor, first: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``rwkv_linear_attention`` of key and value ``[B, T, D]`` (Peng et al. 2023, arXiv 2305.13048, eq. 14).

    ``o_t = (Σ_{s<t} e^{−(t−1−s) w + k_s} v_s + e^{u + k_t} v_t) / (the same without v)``, w = e^decay, u = first. Both
    sums are states before a token's own write: those of shifted tokens. They are kept divided by e^m, m the logarithm
    of the largest weight; no result depends on m.
    """
    k, v = key.float(), value.float()
    before = token_shift(torch.cat([k, v, torch.ones_like(k[..., :1])], -1), **call.split).o
    k_before, v_before, there = before.split([k.shape[-1], v.shape[-1], 1], -1)
    written = torch.where(there > 0, k_before, NEVER)
    f = (-decay.float().exp()).expand_as(k)
    m = stabiliser(written, f, _never(call, k), CommonOptions(**call.split))
    weight = there * torch.exp(written - m.after.float())
    g = f + torch.minimum((m.before - m.after).float(), -f.detach())  # never above zero by a rounding
    sums = hgrn(torch.cat([weight * v_before, weight], -1), torch.cat([g, g], -1), **call.split).o
    above, below = sums.chunk(2, -1)
    own = first.float() + k
    largest = torch.maximum(m.after.float(), own.detach())
    earlier, own = torch.exp(m.after.float() - largest), torch.exp(own - largest)
    return ((earlier * above + own * v) / (earlier * below + own)).to(key.dtype)


def _never(call: ModelCall, like: Tensor) -> Tensor:
    """m before each document: nothing has been written."""
    layout, cu = call.layout, call.split.get("cu_seqlens")
    documents = like.shape[0] if cu is None else cu.numel() - 1
    if layout is not None and layout.packed:
        documents = layout.num_documents
    return like.new_full((documents, like.shape[-1]), NEVER)


def _shifting(call: ModelCall, layer: Any) -> Any:
    """The layer with a shift over the split sequence."""
    return _Shifting(layer, time_shift=lambda x: token_shift(x, **call.split).o)


class _Shifting(Overriding):
    """`Overriding` for a method that the forward calls, too."""

    def extract_key_value(self, hidden: Tensor) -> Any:
        return type(self.module).extract_key_value(self, hidden)


MIXERS = {"RwkvSelfAttention": time_mixing, "RwkvFeedForward": channel_mixing}
UNCACHED = {"RwkvSelfAttention"}
