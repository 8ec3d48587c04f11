"""Gates per key channel: gated linear attention and HGRN-2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import by_element
from ..checks import check_above_zero, check_share
from ..choices import Mode, RecurrenceBackend
from ..kernels.fused.log_decay import decay_gate
from ..recurrences import gla, hgrn2
from .layer import Layer, LayerCall, LayerOutput, LayerState, divide, merge_heads, positive, split_heads
from .parts import GatedRMSNorm, RMSNorm


class GatedLinearAttention(Layer):
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635, §4.4).

        α_t = sigmoid(x W_α¹ W_α² + b)^(1/τ),   S ← diag(α) S + k vᵀ,   out = (swish(x W_r) ⊙ norm(heads)) W_O

    Args:
        dim: D. num_heads: H. key_dim: H·K (default D / 2). value_dim: H·V (default D).
        gate_rank: width between W_α¹ and W_α². temperature: τ.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate_rank: int = 16,
        temperature: float = 16.0,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        check_above_zero("temperature", temperature)
        positive("gate_rank", gate_rank)
        self.num_heads, self.temperature, self.mode, self.backend = num_heads, temperature, mode, backend
        keys = dim // 2 if key_dim is None else positive("key_dim", key_dim)
        values = dim if value_dim is None else positive("value_dim", value_dim)
        divide("num_heads", keys, num_heads)
        V = divide("num_heads", values, num_heads)
        self.widths = [keys, keys, values, values]
        self.qkvr_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.decay_proj = nn.Sequential(nn.Linear(dim, gate_rank, bias=False), nn.Linear(gate_rank, keys))
        self.norm = GatedRMSNorm(V)
        self.out_proj = nn.Linear(values, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        q, k, v, r = (split_heads(y, self.num_heads) for y in call.rows(self.qkvr_proj, x).split(self.widths, -1))
        g = call.rows(self._decay, call.rows(self.decay_proj, x))
        o, S = gla(
            q,
            k,
            v,
            split_heads(g, self.num_heads),
            initial_state=None if state is None else state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = call.rows(self.out_proj, merge_heads(call.rows(self.norm, o, r)))
        return LayerOutput(o, LayerState(S) if call.output_state else None)

    @by_element
    def _decay(self, y: Tensor) -> Tensor:
        return decay_gate(y, sign=-1.0, factor=1 / self.temperature)  # logsigmoid / τ


class HGRN2(Layer):
    """HGRN-2 (Qin et al. 2024, arXiv 2404.07904, §3): the key is what the forget gate lets go.

        f = β + (1 − β) sigmoid(x W_f),   S ← diag(f) S + (1 − f) iᵀ,   out = norm(heads) W_O,   q = swish(x W_q)

    Args:
        dim: D. num_heads: H (default D / 128, the paper's state expansion). lower_bound: β of this layer, in [0, 1);
            the paper lets it grow with depth.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        lower_bound: float = 0.0,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        check_share("lower_bound", lower_bound)
        self.num_heads = max(1, dim // 128) if num_heads is None else num_heads
        self.lower_bound, self.mode, self.backend = lower_bound, mode, backend
        divide("num_heads", dim, self.num_heads)
        self.qfi_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.norm = RMSNorm(dim)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        q, f, i = call.rows(self.qfi_proj, x).chunk(3, -1)
        g = call.rows(self._decay, f)
        o, S = hgrn2(
            split_heads(call.rows(F.silu, q), self.num_heads),
            split_heads(g, self.num_heads),
            split_heads(i, self.num_heads),
            initial_state=None if state is None else state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = call.rows(self.out_proj, call.rows(self.norm, merge_heads(o)))
        return LayerOutput(o, LayerState(S) if call.output_state else None)

    @by_element
    def _decay(self, f: Tensor) -> Tensor:
        g = decay_gate(f, sign=-1.0)  # logsigmoid
        return torch.log(self.lower_bound + (1 - self.lower_bound) * g.exp()) if self.lower_bound else g
