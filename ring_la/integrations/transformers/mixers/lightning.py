"""MiniMax's lightning attention, whose maths stand in the middle of its forward."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ....recurrences import lightning_attention
from ..call import ModelCall
from ..names import takes_cache


@takes_cache
def minimax(
    call: ModelCall,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: object = None,
    attention_mask: None = None,
    cache: Any = None,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """``MiniMaxLightningAttention``: a static decay a head and no scale; all heads normed together, then gated."""
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (layer.num_attention_heads, -1))
    q, k, v = qkv.split(layer.head_dim, -1)
    decay = -layer.slope_rate.flatten().float()
    before = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    state: dict[str, Any] = dict(initial_state=before, output_final_state=cache is not None)
    out = call.operator(lightning_attention, q, k, v, g=decay, scale=1.0, **state)
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, out.final_state.to(v.dtype))
    o = layer.norm(out.o.flatten(2)) * F.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(o), out.final_state


def minimax_model(call: ModelCall, layer: Any, *args, use_cache: bool | None = None, **keywords):
    """``MiniMaxModel``, which takes no cache but its own where it is told to use one."""
    return type(layer).forward(layer, *args, use_cache=False, **keywords)


MIXERS = {"MiniMaxModel": minimax_model, "MiniMaxLightningAttention": minimax}
