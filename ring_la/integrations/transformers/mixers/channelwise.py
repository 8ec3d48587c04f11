"""Mixers whose channels each carry a state of their own: Mamba (selective scan) and Griffin's RG-LRU.

Mamba's A differs by channel and state: every channel is a head with one value, ``S ← diag(exp g) S + k v``, whose gate
has a row a channel. An RG-LRU has one number a channel, which is HGRN's recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from ....conv import short_conv
from ....recurrences import gla, hgrn
from ..call import ModelCall
from ..names import takes_cache
from .convolution import causal_conv1d_fn
from .indexed import Overriding
from .mamba import no_fused_kernel


def selective_scan(
    call: ModelCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """``selective_scan_fn`` of mamba_ssm: ``hidden_states, dt, z [B, H, T]``, ``A [H, K]``, ``B, C [B, K, T]``.

    Gu & Dao 2023, arXiv 2312.00752, eq. 2–4: ``h ← exp(dt A) h + dt B x``, ``y = C h + D x``.
    """
    x, dt = hidden_states.transpose(1, 2).float(), dt.transpose(1, 2).float()
    dt = dt if delta_bias is None else dt + delta_bias.float()
    dt = F.softplus(dt) if delta_softplus else dt
    q, k = (y.transpose(1, 2)[:, :, None].float() for y in (C, B))
    g = dt[..., None] * A.float()
    before = None if call.earlier is None else call.earlier.state()
    before = None if before is None else before[..., None].float()
    how: dict[str, Any] = dict(scale=1.0, initial_state=before, output_final_state=return_last_state)
    out = call.operator(gla, q, k, (dt * x)[..., None], g, **how)
    y = out.o[..., 0] if D is None else out.o[..., 0] + x * D.float()
    y = y.transpose(1, 2).to(hidden_states.dtype)
    y = y if z is None else y * F.silu(z)
    return (y, out.final_state[..., 0]) if return_last_state else y


@takes_cache
def griffin_block(
    call: ModelCall,
    layer: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    use_cache: bool | None = None,
    cache: Any = None,
    **_: object,
) -> tuple[Tensor, None]:
    """``RecurrentGemmaRecurrentBlock``: a short convolution, then the RG-LRU, beside a gate.

    What it remembers is in the cache, as that of other mixers is, and not in the layer, where the library has it.
    """
    number, conv, kept = getattr(layer, "layer_idx", None), layer.conv_1d, cache is not None
    tail, before = (cache.get_conv_state(number), cache.get_recurrent_state(number)) if kept else (None, None)
    x = layer.linear_x(input_states)
    mixed = call.operator(short_conv, x, weight=conv.weight[:, 0], bias=conv.bias, initial_state=tail).o
    o, final = rg_lru(call, layer.rg_lru, mixed, position_ids, before, kept)
    if kept:  # written where they are, so after they are read
        cache.update_conv_state(x.transpose(1, 2), number, conv_kernel_size=layer.conv1d_width - 1)
        cache.update_recurrent_state(final, number)
    return layer.linear_out(o * layer.act_fn(layer.linear_y(input_states))), None


def rg_lru(
    call: ModelCall, layer: Any, x: Tensor, position_ids: Tensor, before: Tensor | None, wants_final: bool
) -> tuple[Tensor, Tensor | None]:
    """``RecurrentGemmaRglru`` (De et al. 2024, arXiv 2402.19427, eq. 3–4): ``h ← a h + x`` in every channel.

    `before` and the state after the last token, if wanted, are ``[B, D]`` in fp32.
    """
    final = None

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, **_: object) -> tuple[Tensor, None]:
        nonlocal final
        smallest = torch.finfo(torch.float32).tiny
        g = recurrent_gate.float().clamp(min=smallest).log()  # documents' first tokens have a = 0 and no state before
        how = dict(initial_state=before, output_final_state=wants_final)
        out = call.operator(hgrn, hidden_states.float(), g, **how)
        final = out.final_state if wants_final else None
        return out.o.to(hidden_states.dtype), None

    return Overriding(layer, _rnn_scan=scan).forward(x, position_ids), final


SELECTIVE = {"causal_conv1d_fn": causal_conv1d_fn, "mamba_selective_scan": selective_scan}
FUSED = SELECTIVE | {"mamba_inner_fn": no_fused_kernel}

SCANS = {
    "MambaMixer": FUSED,
    "FalconMambaMixer": FUSED,
    "JambaMambaMixer": SELECTIVE,
    "ZambaMambaMixer": SELECTIVE,
}
"""Mamba-1, whose scans go on from earlier tokens in ours alone: those of the library begin anew."""
MIXERS = {
    **SCANS,
    "RecurrentGemmaRecurrentBlock": griffin_block,
}
OURS_WITH_CACHE = {"RecurrentGemmaRecurrentBlock"} if hasattr(Cache, "get_conv_state") else set()
"""The library's leaves nothing in a cache, which has a place for it since Transformers 5.23: it keeps one state in
itself."""
UNCACHED = {"RecurrentGemmaRecurrentBlock"} - OURS_WITH_CACHE
