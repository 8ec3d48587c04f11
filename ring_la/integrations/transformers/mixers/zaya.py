"""Zaya's compressed convolutional attention: q and k pass two convolutions, half of v comes from the token before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....conv import behind, token_shift
from ..call import ModelCall
from ..names import takes_cache


@takes_cache
def cca_projection(
    call: ModelCall, layer: Any, hidden_states: Tensor, cache: Any = None, conv_mask: None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``ZayaCCAProjection``: q ``[B, T, H, D]``, k and v ``[B, T, Hk, D]``."""
    groups, D = layer.num_key_value_groups, layer.head_dim
    q, k = layer.q_proj(hidden_states), layer.k_proj(hidden_states)
    qk, number, kept = torch.cat([q, k], -1), layer.layer_idx, cache is not None
    tail, last = (cache.get_conv_state(number), cache.get_recurrent_state(number)) if kept else (None, None)
    led = behind(qk, layer.conv_kernel_size, None if tail is None else tail.mT, call.layout, call.cu_seqlens)
    mixed = layer.conv_qk_grouped(layer.conv_qk_depthwise(led.rows.mT)).mT.index_select(1, led.token)
    mixed_q, mixed_k = mixed.split([q.shape[-1], k.shape[-1]], -1)

    q_rest = (q.unflatten(-1, (-1, D)) + k.unflatten(-1, (-1, D)).repeat_interleave(groups, 2)) * 0.5
    k_rest = q_rest.unflatten(2, (-1, groups)).mean(3)

    delayed = layer.v_proj_delayed(hidden_states)
    before, final = token_shift(delayed, initial_state=last, output_final_state=kept, **call.split)
    if last is None:  # a document's first token has none before
        nothing = layer.v_proj_delayed(torch.zeros_like(hidden_states[:, :1]))
        before = torch.where(_first(call, hidden_states)[:, None], nothing, before)
    if kept:  # written where they are, so after they are read
        cache.update_conv_state(qk.mT, number, conv_kernel_size=layer.conv_kernel_size)
        cache.update_recurrent_state(final, number)
    v = torch.cat([layer.v_proj_current(hidden_states), before], -1).unflatten(-1, (-1, D))
    return mixed_q.unflatten(-1, (-1, D)) + q_rest, mixed_k.unflatten(-1, (-1, D)) + k_rest, v


def _first(call: ModelCall, x: Tensor) -> Tensor:
    """Whether a token is its document's first, bool ``[T_local]``."""
    if call.layout is not None:
        return call.layout.positions.to(x.device) == 0
    return torch.isin(torch.arange(x.shape[1], device=x.device), call.cu_seqlens[:-1])


MIXERS = {"ZayaCCAProjection": cca_projection}
