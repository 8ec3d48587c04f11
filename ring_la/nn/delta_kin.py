"""Kin of gated DeltaNet: Comba, gated DeltaNet 2 and the gated delta product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..blockwise import by_element, over, repeated
from ..kernels.fused.log_decay import decay_gate
from ..kernels.fused.unit_length import l2norm
from ..outputs import LinearAttentionOutput
from ..recurrences import gated_delta_product, gated_delta_rule, gdn2
from ..recurrences.erase import least_decay
from .delta import GatedDeltaNet, KimiDeltaAttention
from .layer import LayerCall, LayerOutput, LayerState, merge_heads, positive, split_heads, wide
from .parts import ShortConv


class Comba(GatedDeltaNet):
    """Comba (Hu et al. 2025, arXiv 2506.02475; `comba`): what is erased is p = b k, which corrects the query, too.

        S ← (e^g I − β k pᵀ) S + β k vᵀ,   p = b k,   o = Sᵀ (q − d p)

    with b = sigmoid(·) and d learned numbers of each head. This is the gated delta rule with β b e^−g and v e^g / b.
    Arguments as in `DeltaNet`.
    """

    def make_gates(self) -> None:
        super().make_gates()
        self.feedback = nn.Parameter(torch.ones(self.num_value_heads))
        self.correction = nn.Parameter(torch.full((self.num_value_heads,), 0.02))

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        g = call.rows(decay_gate, call.rows(self.decay_proj, x), shared=(self.A_log, self.dt_bias))
        g = g.clamp(min=least_decay(v.dtype))
        q, k, v, beta = call.rows(self._corrected, q, k, v, beta, g, shared=(self.feedback, self.correction))
        keywords["use_qk_l2norm"] = False
        return gated_delta_rule(q, k, v, g, beta, **keywords)

    @by_element
    def _corrected(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, feedback: Tensor, correction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the gated delta rule takes, q and k of unit length."""
        b, g = torch.sigmoid(wide(feedback)), wide(g)
        repeat = self.num_value_heads // self.num_heads
        q, k = (repeated(l2norm(y), repeat) for y in (q, k))
        q = q - (over((correction * b)[..., None], k.shape[-1]) * k).to(q.dtype)
        written = v / over(b[..., None], v.shape[-1]) * torch.exp(g)[..., None]
        return q, k, written.to(v.dtype), beta * b * torch.exp(-g)


class GatedDeltaNet2(KimiDeltaAttention):
    """Gated DeltaNet 2: gates of each channel for erasing and for writing (see `gdn2`), else as `KimiDeltaAttention`.

    S ← (I − k (b ⊙ k)ᵀ) diag(e^g) S + k (w ⊙ v)ᵀ,   b = β sigmoid(x W_b↓ W_b↑),   w = β sigmoid(x W_w↓ W_w↑)
    """

    def make_gates(self) -> None:
        super().make_gates()
        dim, H, K, V = self.dim, self.num_value_heads, self.K, self.V
        self.erase_proj = nn.Sequential(nn.Linear(dim, V, bias=False), nn.Linear(V, H * K))
        self.write_proj = nn.Sequential(nn.Linear(dim, V, bias=False), nn.Linear(V, H * V))

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        @by_element
        def gate(y: Tensor, rate: Tensor) -> Tensor:
            y = split_heads(wide(y), self.num_value_heads)
            return (over(rate[..., None], y.shape[-1]) * torch.sigmoid(y)).to(v.dtype)

        b, w = (call.rows(gate, call.rows(proj, x), beta) for proj in (self.erase_proj, self.write_proj))
        return gdn2(q, k, v, self.decay(x, call), b, w, **keywords)


class GatedDeltaProduct(GatedDeltaNet):
    """Gated DeltaProduct (Siems et al. 2025, arXiv 2502.10297, §3): n delta steps a token, each with its k, v and β.

    Args:
        steps: n. The others as in `DeltaNet`.
    """

    same_bits = True

    def __init__(self, dim: int, num_heads: int, *, steps: int = 2, **options: Any) -> None:
        self.steps = positive("steps", steps)
        super().__init__(dim, num_heads, **options)
        self.widths = [self.widths[0], steps * self.widths[1], steps * self.widths[2]]
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.conv = ShortConv(sum(self.widths), self.conv.weight.shape[1])
        self.beta_proj = nn.Linear(dim, steps * self.num_value_heads, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        state = state or LayerState()
        qkv, tail = self.conv(call.rows(self.qkv_proj, x), state.tail, call)
        q, k, v = qkv.split(self.widths, -1)
        k, v = (split_heads(y, self.steps * n) for y, n in ((k, self.num_heads), (v, self.num_value_heads)))
        o, S = gated_delta_product(
            split_heads(q, self.num_heads),
            k.unflatten(2, (self.steps, -1)),
            v.unflatten(2, (self.steps, -1)),
            call.rows(decay_gate, call.rows(self.decay_proj, x), shared=(self.A_log, self.dt_bias)),
            call.rows(self._rates, call.rows(self.beta_proj, x)).unflatten(2, (self.steps, -1)),
            use_qk_l2norm=True,
            initial_state=state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = call.rows(self.out_proj, merge_heads(self.readout(x, o, call)))
        return LayerOutput(o, LayerState(S, tail) if call.output_state else None)
