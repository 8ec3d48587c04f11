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
    qk = behind(torch.cat([q, k], -1), layer.conv_kernel_size, None, call.layout, call.cu_seqlens)
    mixed = layer.conv_qk_grouped(layer.conv_qk_depthwise(qk.rows.mT)).mT.index_select(1, qk.token)
    mixed_q, mixed_k = mixed.split([q.shape[-1], k.shape[-1]], -1)

    q_rest = (q.unflatten(-1, (-1, D)) + k.unflatten(-1, (-1, D)).repeat_interleave(groups, 2)) * 0.5
    k_rest = q_rest.unflatten(2, (-1, groups)).mean(3)

    before = token_shift(layer.v_proj_delayed(hidden_states), **call.split).o
    nothing = layer.v_proj_delayed(torch.zeros_like(hidden_states[:, :1]))  # a document's first token has none before
    before = torch.where(_first(call, hidden_states)[:, None], nothing, before)
    v = torch.cat([layer.v_proj_current(hidden_states), before], -1).unflatten(-1, (-1, D))
    return mixed_q.unflatten(-1, (-1, D)) + q_rest, mixed_k.unflatten(-1, (-1, D)) + k_rest, v


def _first(call: ModelCall, x: Tensor) -> Tensor:
    """Whether a token is its document's first, bool ``[T_local]``."""
    if call.layout is not None:
        return call.layout.positions.to(x.device) == 0
    return torch.isin(torch.arange(x.shape[1], device=x.device), call.cu_seqlens[:-1])


MIXERS = {"ZayaCCAProjection": cca_projection}
UNCACHED = {"ZayaCCAProjection"}
