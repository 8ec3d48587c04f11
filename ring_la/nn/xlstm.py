"""The matrix memory of xLSTM (Beck et al. 2024, arXiv 2405.04517)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..choices import Mode, RecurrenceBackend
from ..kernels.fused.log_decay import decay_gate
from ..recurrences import mlstm
from .layer import (
    Layer,
    LayerCall,
    LayerOutput,
    LayerState,
    divide,
    head_width,
    merge_heads,
    positive,
    split_heads,
    wide,
)
from .parts import RMSNorm


class MLSTM(Layer):
    """mLSTM as in xLSTM-7B (Beck et al. 2025, arXiv 2503.13427, eq. 1–9): input gates capped softly at 15.

        i = 15 tanh((x W_i + b_i) / 15),   f = logsigmoid(x W_f + b_f)
        C ← e^f C + e^i k vᵀ,   n ← e^f n + e^i k,   out = (RMSNorm(Cᵀ q / max(|nᵀ q|, 1)) ⊙ sigmoid(x W_o)) W

    The state is ``[N, H, K, V + 2]``: C, n as one more column, and m in the first row of the last (see `mlstm`).

    Args:
        dim: D. num_heads: H. key_dim: H·K (default D / 2). head_dim: V (default D / H).
        mode, backend: as in the recurrences.
    """

    same_bits = True
    CAP = 15.0

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        head_dim: int | None = None,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        V = head_width(dim, num_heads, head_dim)
        keys = dim // 2 if key_dim is None else positive("key_dim", key_dim)
        divide("num_heads", keys, num_heads)
        self.num_heads, self.V, self.mode, self.backend = num_heads, V, mode, backend
        self.state_shape = num_heads, keys // num_heads, V + 2
        self.widths = [keys, keys, num_heads * V, num_heads * V]
        self.qkvo_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.gates_proj = nn.Linear(dim, 2 * num_heads)
        with torch.no_grad():
            self.gates_proj.bias[:num_heads] = -10.0
            self.gates_proj.bias[num_heads:] = torch.linspace(3.0, 6.0, num_heads)
        self.norm = RMSNorm(V)
        self.out_proj = nn.Linear(num_heads * V, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        q, k, v, gate = (split_heads(y, self.num_heads) for y in call.rows(self.qkvo_proj, x).split(self.widths, -1))
        i, f = call.rows(self._gates, call.rows(self.gates_proj, x))
        initial = None
        if state is not None:
            S: Any = state.recurrent
            initial = (S[..., : self.V], S[..., self.V], S[..., 0, self.V + 1])
        o, final = mlstm(
            q,
            k,
            v,
            i,
            f,
            initial_state=initial,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = call.rows(lambda o, gate: merge_heads(o * F.sigmoid(gate)), call.rows(self.norm, o), gate)
        o = call.rows(self.out_proj, o)
        if not call.output_state:
            return LayerOutput(o, None)
        if call.in_place:
            return LayerOutput(o, state)
        C, n, m = final  # type: ignore[misc]
        last = F.pad(m[..., None], (0, C.shape[-2] - 1))  # the first row is m
        return LayerOutput(o, LayerState(torch.cat([C, n[..., None], last[..., None].to(C.dtype)], -1)))

    def _gates(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The input gate, and the logarithm of the forget gate."""
        i, f = wide(y).chunk(2, -1)
        return self.CAP * torch.tanh(i / self.CAP), decay_gate(f, sign=-1.0)  # logsigmoid
