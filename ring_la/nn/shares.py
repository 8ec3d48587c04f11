"""Layers whose keys share what they write: LightNet, and ABC, attention with bounded memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..choices import Mode, RecurrenceBackend
from ..recurrences import abc_attention, lightnet
from .layer import Layer, LayerCall, LayerOutput, LayerState, divide, head_width, merge_heads, positive, split_heads
from .parts import GatedRMSNorm


class LightNet(Layer):
    """LightNet's additive decay (Qin et al. 2024, arXiv 2405.21022), for one direction of a sequence.

        Z ← Z + e^k,   S ← (1 − k̂) ⊙ S + k̂ vᵀ,   k̂ = e^k / Z,   out = (RMSNorm(Sᵀ SiLU(x W_q)) ⊙ SiLU(x W↓ W↑)) W_O

    The state is ``[N, H, K, V + 1]``: S, and log(1 + Z) in the last column.

    Args:
        dim: D. num_heads: H (default D / 128), V = D / H. key_dim: K of each head. gate_rank: width between W↓ and W↑.
        mode, backend: as in the recurrences.
    """

    same_bits = True
    cuts = "Weights are kept divided by the largest since the state, which a block does not begin"

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        key_dim: int = 128,
        gate_rank: int = 128,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.num_heads = max(1, dim // 128) if num_heads is None else num_heads
        self.V, self.mode, self.backend = divide("num_heads", dim, self.num_heads), mode, backend
        keys = self.num_heads * positive("key_dim", key_dim)
        self.state_shape = self.num_heads, key_dim, self.V + 1
        self.widths = [keys, keys, dim]
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False)
        rank = positive("gate_rank", gate_rank)
        self.gate_proj = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))
        self.norm = GatedRMSNorm(dim)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        q, k, v = call.rows(self.qkv_proj, x).split(self.widths, -1)
        q, k, v = (split_heads(y, self.num_heads) for y in (call.rows(F.silu, q), k, v))
        initial: Any = None
        if state is not None:
            S: Any = state.recurrent
            initial = (S[..., : self.V], S[..., self.V])
        o, final = lightnet(q, k, v, initial_state=initial, mode=self.mode, backend=self.backend, **call.keywords)
        gated = call.rows(self.norm, merge_heads(o), call.rows(self.gate_proj, x))
        o = call.rows(self.out_proj, gated)
        if not call.output_state:
            return LayerOutput(o, None)
        if call.in_place:
            return LayerOutput(o, state)
        S, z = final  # type: ignore[misc]
        return LayerOutput(o, LayerState(torch.cat([S, z[..., None]], -1)))


class ABCAttention(Layer):
    """ABC, attention with bounded memory (Peng et al. 2022, arXiv 2110.02488): slots that hold weighted means.

        q, k, v = SiLU(x W),   s = x W_s within ±32,   Z ← Z + e^s,   ŝ = e^s / Z
        Hk ← Hk diag(1 − ŝ) + k ŝᵀ,   Hv ← diag(1 − ŝ) Hv + ŝ vᵀ
        out = (RMSNorm(Hvᵀ softmax(Hkᵀ q)) ⊙ SiLU(x W_g)) W_O

    The state is ``[N, H, K + V + 1, M]``: Hk, the transpose of Hv, and log(1 + Z).

    Args:
        dim: D. num_heads: H. head_dim: K = V (default D / H). slots: M.
        mode, backend: as in the recurrences.
    """

    same_bits = True
    cuts = "Weights are kept divided by the largest since the state, which a block does not begin"
    LARGEST = 32.0

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        slots: int = 64,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.K, self.num_heads = head_width(dim, num_heads, head_dim), num_heads
        self.mode, self.backend = mode, backend
        inner = num_heads * self.K
        self.state_shape = num_heads, 2 * self.K + 1, slots
        self.qkv_proj, self.gate_proj = nn.Linear(dim, 3 * inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.slot_proj = nn.Linear(dim, num_heads * positive("slots", slots), bias=False)
        self.norm = GatedRMSNorm(self.K)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        qkv = call.rows(F.silu, call.rows(self.qkv_proj, x))
        s = call.rows(lambda y: y.clamp(-self.LARGEST, self.LARGEST), call.rows(self.slot_proj, x))
        q, k, v, s, gate = (
            split_heads(y, self.num_heads) for y in (*qkv.chunk(3, -1), s, call.rows(self.gate_proj, x))
        )
        initial: Any = None
        if state is not None:
            S: Any = state.recurrent
            initial = (S[..., : self.K, :], S[..., self.K : -1, :].mT, S[..., -1, :])
        o, final = abc_attention(
            q, k, v, s, initial_state=initial, mode=self.mode, backend=self.backend, **call.keywords
        )
        o = call.rows(self.out_proj, merge_heads(call.rows(self.norm, o, gate)))
        if not call.output_state:
            return LayerOutput(o, None)
        if call.in_place:
            return LayerOutput(o, state)
        keys, values, z = final  # type: ignore[misc]
        return LayerOutput(o, LayerState(torch.cat([keys, values.mT, z[..., None, :]], -2)))
