"""Preconditioned gated DeltaNet and KDA: keys that write are scaled by how much their channels have been written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..blockwise import by_element
from ..kernels.fused.log_decay import decay_gate
from ..outputs import LinearAttentionOutput
from ..recurrences import preconditioned_gated_delta_rule, preconditioned_kda
from .delta import DeltaLayer, GatedDeltaNet, KimiDeltaAttention, decay_parameters
from .layer import LayerCall, wide


class _Preconditioned(DeltaLayer):
    """What both have of their own: the preconditioner's decay, rate and center, a head of keys each."""

    def make_preconditioner(self) -> None:
        heads = self.num_heads
        self.state_shape = self.num_value_heads, self.K, self.V + 1
        self.seen_decay_proj = nn.Linear(self.dim, heads, bias=False)
        self.seen_rate_proj = nn.Linear(self.dim, heads, bias=False)
        self.seen_A_log, self.seen_dt_bias = decay_parameters(heads, heads)
        self.center = nn.Parameter(torch.full((heads,), -0.2))

    def _run(
        self, rule: Callable[..., LinearAttentionOutput], x: Tensor, call: LayerCall, *tokens: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        """The rule, with its state ``(S, A)`` as one, A in the last column."""
        state = keywords.pop("initial_state")
        h = call.rows(decay_gate, call.rows(self.seen_decay_proj, x), shared=(self.seen_A_log, self.seen_dt_bias))
        alpha = call.rows(_rate, call.rows(self.seen_rate_proj, x))
        initial = None if state is None else (state[..., : self.V], state[..., self.V])
        o, final = rule(*tokens, h, alpha, self.center, initial_state=initial, **keywords)
        if final is None or call.in_place:
            return LinearAttentionOutput(o, state if call.in_place else None)
        S, A = final
        return LinearAttentionOutput(o, torch.cat([S, A[..., None]], -1))


class PreconditionedGatedDeltaNet(_Preconditioned, GatedDeltaNet):
    """Preconditioned gated DeltaNet (arXiv 2604.21100, as in fla-core 0.6.0), else as `GatedDeltaNet`.

        A ← e^h A + α k²,   S ← e^g (I − β k̂ kᵀ) S + β k̂ vᵀ,   k̂ = k ⊙ 1.5^(−r / (1 + |r|)),  r = log A − c

    h = −e^{A_log'} softplus(x W_h + dt_bias'), α = sigmoid(x W_α), c one number for each head of keys. Arguments as in
    `DeltaNet`.
    """

    def make_gates(self) -> None:
        super().make_gates()
        self.make_preconditioner()

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        g = call.rows(decay_gate, call.rows(self.decay_proj, x), shared=(self.A_log, self.dt_bias))
        return self._run(preconditioned_gated_delta_rule, x, call, q, k, v, g, beta, **keywords)


class PreconditionedKDA(_Preconditioned, KimiDeltaAttention):
    """Preconditioned KDA (arXiv 2604.21100, as in fla-core 0.6.0): that of `PreconditionedGatedDeltaNet` in
    `KimiDeltaAttention`, which decays each key channel; arguments as there."""

    def make_gates(self) -> None:
        super().make_gates()
        self.make_preconditioner()

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        return self._run(preconditioned_kda, x, call, q, k, v, self.decay(x, call), beta, **keywords)


@by_element
def _rate(y: Tensor) -> Tensor:
    return torch.sigmoid(wide(y))
