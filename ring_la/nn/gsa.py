"""Gated slot attention (Zhang et al. 2024, arXiv 2409.07146)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import by_element
from ..checks import check_above_zero
from ..choices import Mode, RecurrenceBackend
from ..kernels.fused.log_decay import decay_gate
from ..recurrences import gated_slot_attention
from .layer import Layer, LayerCall, LayerOutput, LayerState, head_width, merge_heads, positive, split_heads
from .parts import RMSNorm


class GatedSlotAttention(Layer):
    """Gated slot attention (arXiv 2409.07146): M slots of keys and values, read by a softmax over slots.

        q, k, v = SiLU(x W),   α = sigmoid(x W_α)^(1/τ)
        Hk ← Hk diag(α) + k (1 − α)ᵀ,   Hv ← diag(α) Hv + (1 − α) vᵀ,   out = RMSNorm(SiLU(Hvᵀ softmax(Hkᵀ q))) W_O

    The state is ``[N, H, K + V, M]``: Hk, and below it the transpose of Hv.

    Args:
        dim: D. num_heads: H. head_dim: K = V (default D / H). slots: M. temperature: τ.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        slots: int = 64,
        temperature: float = 8.0,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.K = head_width(dim, num_heads, head_dim)
        check_above_zero("temperature", temperature)
        self.num_heads, self.temperature, self.mode, self.backend = num_heads, temperature, mode, backend
        self.state_shape = num_heads, 2 * self.K, slots
        self.qkv_proj = nn.Linear(dim, 3 * num_heads * self.K, bias=False)
        self.decay_proj = nn.Linear(dim, num_heads * positive("slots", slots), bias=False)
        self.norm = RMSNorm(num_heads * self.K)
        self.out_proj = nn.Linear(num_heads * self.K, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        qkv = call.rows(F.silu, call.rows(self.qkv_proj, x))
        q, k, v = (split_heads(y, self.num_heads) for y in qkv.chunk(3, -1))
        s, g = (split_heads(y, self.num_heads) for y in call.rows(self._gates, call.rows(self.decay_proj, x)))
        initial = None
        if state is not None:
            S: Any = state.recurrent
            initial = (S[..., : self.K, :], S[..., self.K :, :].mT)
        o, final = gated_slot_attention(
            q,
            k,
            v,
            s,
            g,
            initial_state=initial,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = call.rows(self.out_proj, call.rows(self.norm, call.rows(F.silu, merge_heads(o))))
        if not call.output_state:
            return LayerOutput(o, None)
        if call.in_place:
            return LayerOutput(o, state)
        keys, values = final  # type: ignore[misc]
        return LayerOutput(o, LayerState(torch.cat([keys, values.mT], -2)))

    @by_element
    def _gates(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens write into slots, and the logarithm of what slots keep."""
        g = decay_gate(y, sign=-1.0, factor=1 / self.temperature)
        return -torch.expm1(g), g
