"""Mixers whose channels each carry a state of their own: Mamba (selective scan) and Griffin's RG-LRU.

Every channel is a head with one value: ``S ← diag(exp g) S + k v``. Mamba's A differs by channel and state, so its gate
has a row a channel; an RG-LRU has one number a channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....conv import short_conv
from ....recurrences import gla, simple_gla
from ..call import ModelCall
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
    how: dict[str, Any] = dict(scale=1.0, output_final_state=return_last_state)
    out = call.operator(gla, q, k, (dt * x)[..., None], g, **how)
    y = out.o[..., 0] if D is None else out.o[..., 0] + x * D.float()
    y = y.transpose(1, 2).to(hidden_states.dtype)
    y = y if z is None else y * F.silu(z)
    return (y, out.final_state[..., 0]) if return_last_state else y


def rg_lru(call: ModelCall, layer: Any, *args, **keywords) -> Tensor:
    """``RecurrentGemmaRglru`` (De et al. 2024, arXiv 2402.19427, eq. 3–4): ``h ← a h + x`` in every channel."""

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, **_: object) -> tuple[Tensor, None]:
        x, ones = hidden_states.float()[..., None], hidden_states.new_ones(*hidden_states.shape[:2], 1, 1).float()
        smallest = torch.finfo(torch.float32).tiny
        g = recurrent_gate.float().clamp(min=smallest).log()  # documents' first tokens have a = 0 and no state before
        return call.operator(simple_gla, ones, ones, x, g, scale=1.0).o[..., 0].to(hidden_states.dtype), None

    return Overriding(layer, _rnn_scan=scan).forward(*args, **keywords)


def griffin_block(call: ModelCall, layer: Any, *args, use_cache: bool | None = None, **keywords):
    """``RecurrentGemmaRecurrentBlock``: a short convolution, then the RG-LRU."""

    def convolve(x: Tensor) -> Tensor:
        conv = layer.conv_1d
        weights = dict(weight=conv.weight[:, 0], bias=conv.bias)
        return call.operator(short_conv, x.transpose(1, 2), **weights).o.transpose(1, 2)

    return Overriding(layer, conv_1d=convolve).forward(*args, use_cache=False, **keywords)


SELECTIVE = {"causal_conv1d_fn": causal_conv1d_fn, "mamba_selective_scan": selective_scan}
FUSED = SELECTIVE | {"mamba_inner_fn": no_fused_kernel}

MIXERS = {
    "MambaMixer": FUSED,
    "FalconMambaMixer": FUSED,
    "JambaMambaMixer": SELECTIVE,
    "ZambaMambaMixer": SELECTIVE,
    "RecurrentGemmaRecurrentBlock": griffin_block,
    "RecurrentGemmaRglru": rg_lru,
}
UNCACHED = {"RecurrentGemmaRecurrentBlock"}
