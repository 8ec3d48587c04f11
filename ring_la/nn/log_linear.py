"""Log-linear Mamba-2 (Guo et al. 2025, arXiv 2506.04761)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..log_linear import log_linear_attention
from .layer import LayerCall, LayerOutput, LayerState, lengths, positive, split_heads, wide
from .mamba2 import Mamba2


class LogLinearMamba2(Mamba2):
    """The Mamba-2 block with a state a level of a Fenwick tree (arXiv 2506.04761, §3), else as `Mamba2`.

        z, xBC, dt, ℓ = in_proj(u);   Δ = softplus(dt + dt_bias),   g = −Δ e^{A_log},   λ = softplus(L ⊙ ℓ)
        y_t = Σ_{s ≤ t} λ_t[level(t, s)] e^{Σ g} (C_tᵀ B_s) Δ_s x_s + D x_t

    The state is ``[N, H, L·K, V]``, its levels one above the other. Where it goes on the host reads how many tokens
    were seen.

    Args:
        levels: L; a document may have 2^(L − 1) tokens. The others as in `Mamba2`; `mode` is of no
            effect.
    """

    same_bits, host_steps = False, True

    def __init__(self, dim: int, num_heads: int | None = None, *, levels: int = 21, **options: Any) -> None:
        self.levels = positive("levels", levels)
        super().__init__(dim, num_heads, **options)
        self.state_shape = self.num_heads, self.levels * self.parts[1] // self.groups, self.parts[0] // self.num_heads
        self.level_weight = nn.Parameter(torch.ones(self.num_heads, self.levels))

    def more_widths(self, num_heads: int) -> list[int]:
        return [num_heads * self.levels]

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        z, xBC, dt, weights = call.rows(self.in_proj, x).split(self.widths, -1)
        xBC, tail = self.conv(xBC, None if state is None else state.tail, call)
        u, B, C = xBC.split(self.parts, -1)
        dt, g, lam = self._gates(dt, split_heads(weights, self.num_heads))
        u = split_heads(u, self.num_heads)
        B, C = (split_heads(y, self.groups) for y in (B, C))
        tokens = [C, B, (dt[..., None] * u).to(u.dtype), g, lam]
        keywords: dict[str, Any] = dict(layout=call.layout, cu_seqlens=call.cu_seqlens)
        if state is not None:
            seen: Any = state.length
            first = tuple(seen.tolist())
            keywords |= dict(first=first, initial_state=state.recurrent.unflatten(2, (self.levels, -1)))  # type: ignore[union-attr]
            if not call.packed:
                keywords["first"] = first[0]
            if not call.packed and len(set(first)) > 1 and call.layout is None:  # rows at several places
                T = x.shape[1]
                tokens = [t.flatten(0, 1)[None] for t in tokens]
                keywords |= dict(first=first, cu_seqlens=torch.arange(0, x.shape[0] * T + 1, T, device=x.device))
        y, S = log_linear_attention(
            *tokens, scale=1.0, output_final_state=call.output_state, backend=self.backend, **keywords
        )
        o = self.behind((y.view(u.shape) + self.D[:, None] * u).to(u.dtype), z, call)
        if not call.output_state:
            return LayerOutput(o, None)
        length = lengths(x, None if state is None else state.length, call)
        assert S is not None
        S = S.flatten(2, 3)
        if call.in_place and state is not None and state.recurrent is not None:
            state.recurrent.copy_(S)
            return LayerOutput(o, LayerState(state.recurrent, tail, length))
        return LayerOutput(o, LayerState(S, tail, length))

    def _gates(self, dt: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Δ, g and λ."""
        dt = F.softplus(wide(dt) + self.dt_bias)
        return dt, -dt * self.A_log.exp(), F.softplus(self.level_weight * wide(weights))
