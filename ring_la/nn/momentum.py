"""Momentum DeltaNet: gated DeltaNet whose steps go by a running sum of gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..blockwise import by_element, over, repeated
from ..kernels.fused.log_decay import decay_gate
from ..kernels.fused.unit_length import l2norm
from ..outputs import LinearAttentionOutput
from ..recurrences import momentum_delta_rule
from .delta import GatedDeltaNet, decay_parameters
from .layer import LayerCall, wide


class MomentumDeltaNet(GatedDeltaNet):
    """Momentum DeltaNet (arXiv 2605.05838, as in fla-core 0.6.0), else as `GatedDeltaNet`.

        M ← e^μ M + η k (Sᵀ p − v)ᵀ,   S ← e^g S − β M,   p = e^g k,   o = Sᵀ (q − e^d k)
        η = 1 + tanh(x W_η / √D),   r = η e^f,   β = r² / (1 + r²) sigmoid(x W_β),   g = −log(1 + r²) + g',
        μ = max(−e^{A'} softplus(x W_μ + dt'), −2)

    with g' the decay of `GatedDeltaNet` and d, f, A' and dt' learned numbers of each head. On a split sequence
    ranks follow one another, a group of heads at a time. The state is ``[N, H, 2K, V]``, S above M. Arguments as in
    `DeltaNet`.
    """

    FASTEST = -2.0
    """The least μ."""

    def make_gates(self) -> None:
        super().make_gates()
        H = self.num_value_heads
        self.state_shape = H, 2 * self.K, self.V
        self.momentum_proj, self.step_proj = (nn.Linear(self.dim, H, bias=False) for _ in range(2))
        self.momentum_A_log, self.momentum_dt_bias = decay_parameters(H, H)
        self.log_factor = nn.Parameter(torch.empty(H).uniform_(0, 4).log())
        self.log_correction = nn.Parameter(torch.rand(H).log())

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        g = call.rows(decay_gate, call.rows(self.decay_proj, x), shared=(self.A_log, self.dt_bias))
        own = (self.momentum_A_log, self.momentum_dt_bias)
        mu = call.rows(decay_gate, call.rows(self.momentum_proj, x), shared=own)
        step = call.rows(self.step_proj, x)
        tokens = call.rows(self._tokens, q, k, g, mu, beta, step, shared=(self.log_factor, self.log_correction))
        q, k, p, *gates = tokens
        state, keywords["use_qk_l2norm"] = keywords.pop("initial_state"), False
        initial: Any = None if state is None else tuple(state.chunk(2, -2))
        o, final = momentum_delta_rule(q, k, v, p, *gates, initial_state=initial, **keywords)
        if final is None or call.in_place:
            return LinearAttentionOutput(o, state if call.in_place else None)
        return LinearAttentionOutput(o, torch.cat(final, -2))  # type: ignore[arg-type]

    @by_element
    def _tokens(self, q: Tensor, k: Tensor, *gates: Tensor) -> tuple[Tensor, ...]:
        """What the momentum delta rule takes, but for v. `gates`: g', μ, the rate of β, x W_η, f and d."""
        g, mu, beta, step, factor, correction = gates
        eta = 1 + torch.tanh(wide(step) / math.sqrt(self.dim))
        ratio = (eta * wide(factor).exp()).square()
        g = g - torch.log1p(ratio)
        repeat = self.num_value_heads // self.num_heads
        q, k = (repeated(l2norm(y), repeat) for y in (q, k))
        q = q - (over(wide(correction).exp()[..., None], k.shape[-1]) * k).to(q.dtype)
        p = (over(g.exp()[..., None], k.shape[-1]) * k).to(k.dtype)
        return q, k, p, g, mu.clamp(min=self.FASTEST), beta * ratio / (1 + ratio), eta
