"""MesaNet (von Oswald et al. 2025, arXiv 2506.05233)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..choices import Mode, RecurrenceBackend
from ..kernels.fused.log_decay import decay_gate
from ..recurrences import mesa_net
from .layer import (
    Layer,
    LayerCall,
    LayerOutput,
    LayerState,
    head_width,
    inverse_softplus,
    merge_heads,
    positive,
    split_heads,
    wide,
)
from .parts import RMSNorm, ShortConv


class MesaNet(Layer):
    """MesaNet (arXiv 2506.05233, §3): what is read is the least-squares fit to all earlier keys and values.

        q, k = SiLU(conv(x W)) to unit length,   v = x W_v,   β = sigmoid(x W_β + b_β),   g = log sigmoid(x W_g + b_g)
        G ← e^g G + β k kᵀ,   S ← e^g S + β k vᵀ,   out = RMSNorm(Sᵀ (G + diag λ)⁻¹ q) W_O,   λ = 1/4 + softplus(·)

    The state is ``[N, H, K, 2K]``, G beside S.

    Args:
        dim: D. num_heads: H. head_dim: K = V (default D / H). conv_width: W of the short convolution of q and k.
        steps: of conjugate gradients; on a split sequence each is an exchange.
        mode, backend: as in the recurrences.
    """

    same_bits = True
    LEAST = 0.25

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        conv_width: int = 4,
        steps: int = 30,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.K, self.num_heads = head_width(dim, num_heads, head_dim), num_heads
        self.steps, self.mode, self.backend = positive("steps", steps), mode, backend
        self.state_shape = num_heads, self.K, 2 * self.K
        inner = num_heads * self.K
        self.qk_proj, self.v_proj = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.conv = ShortConv(2 * inner, conv_width)
        self.rate_proj, self.decay_proj = nn.Linear(dim, num_heads), nn.Linear(dim, num_heads)
        self.ridge = nn.Parameter(inverse_softplus(torch.full((num_heads, self.K), 1 - self.LEAST)))
        self.norm = RMSNorm(self.K)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        qk, tail = self.conv(call.rows(self.qk_proj, x), None if state is None else state.tail, call)
        q, k = (split_heads(y, self.num_heads) for y in qk.chunk(2, -1))
        v = split_heads(call.rows(self.v_proj, x), self.num_heads)
        beta, g = call.rows(self._gates, call.rows(self.rate_proj, x), call.rows(self.decay_proj, x))
        initial: Any = None
        if state is not None:
            S: Any = state.recurrent
            initial = (S[..., : self.K], S[..., self.K :])
        o, final = mesa_net(
            q,
            k,
            v,
            g,
            beta,
            self.LEAST + F.softplus(wide(self.ridge)),
            self.steps,
            use_qk_l2norm=True,
            initial_state=initial,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = call.rows(self.out_proj, merge_heads(call.rows(self.norm, o)))
        if not call.output_state:
            return LayerOutput(o, None)
        if call.in_place and state is not None:
            return LayerOutput(o, state._replace(tail=tail))
        return LayerOutput(o, LayerState(torch.cat(final, -1), tail))  # type: ignore[arg-type]

    @staticmethod
    def _gates(rate: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """β and g."""
        return torch.sigmoid(wide(rate)), decay_gate(decay, sign=-1.0)
