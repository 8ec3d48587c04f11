"""Retention (RetNet) and lightning attention: a static decay a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import by_element
from ..checks import check_depth, is_floats
from ..choices import Mode, RecurrenceBackend
from ..errors import ArgumentError, describe_tensor
from ..recurrences import lightning_attention, retention
from .layer import (
    Layer,
    LayerCall,
    LayerOutput,
    LayerState,
    head_width,
    lengths,
    merge_heads,
    positions,
    positive,
    split_heads,
)
from .parts import HeadNorm, RMSNorm, check_rotation, rotated


class MultiScaleRetention(Layer):
    """Multi-scale retention (RetNet, Sun et al. 2023, arXiv 2307.08621, eq. 5–8).

        Q = (X W_Q) ⊙ Θ,  K = (X W_K) ⊙ Θ̄,  V = X W_V,   head_h = Retention(Q, K, V; γ_h = 1 − 2^(−5−h))
        out = (swish(X W_G) ⊙ GroupNorm_h(heads)) W_O

    Θ_n = e^{inθ} is the rotation of `rotate`. The paper's value width is 2 K.

    Args:
        dim: D. num_heads: H. head_dim: K (default D / H). value_dim: V a head (default 2 K).
        rope_base: base of θ; None: no rotation.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rope_base: float | None = 10000.0,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.num_heads, self.rope_base, self.mode, self.backend = num_heads, rope_base, mode, backend
        K = head_width(dim, num_heads, head_dim)
        V = 2 * K if value_dim is None else positive("value_dim", value_dim)
        check_rotation(rope_base, K)
        self.widths = [num_heads * K, num_heads * K, num_heads * V, num_heads * V]
        self.qkvg_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.norm = HeadNorm(num_heads, V)
        self.out_proj = nn.Linear(num_heads * V, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        state = state or LayerState()
        q, k, v, gate = (split_heads(y, self.num_heads) for y in call.rows(self.qkvg_proj, x).split(self.widths, -1))
        if self.rope_base is not None:
            q, k = rotated(q, k, positions(x, state.length, call), self.rope_base, call)
        o, S = retention(q, k, v, initial_state=state.recurrent, mode=self.mode, backend=self.backend, **call.keywords)
        o = call.rows(_swished, gate, call.rows(self.norm, o))
        o = call.rows(self.out_proj, merge_heads(o))
        if not call.output_state:
            return LayerOutput(o, None)
        return LayerOutput(o, LayerState(S, length=lengths(x, state.length, call)))


class LightningAttention(Layer):
    """Lightning attention as in MiniMax-01 (2025, arXiv 2501.08313, §2.2; kernel: Qin et al. 2024, arXiv 2401.04658).

        [Q K V] = SiLU(X W_QKV),  S ← λ_h S + k vᵀ,  out = (sigmoid(X W_G) ⊙ RMSNorm(heads)) W_O

    Args:
        dim: D. num_heads: H. head_dim: K = V (default D / H).
        layer_idx, num_layers: the default decays are MiniMax's ALiBi slopes, weaker in later layers:
            ``log λ_h = −2^(−8(h+1)/H) · (1 − layer_idx/(num_layers−1) + 1e-5)``.
        log_decay: ``[H]`` instead of them.
        mode, backend: as in the recurrences.
    """

    same_bits = True
    knows_depth = True
    log_decay: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        layer_idx: int = 0,
        num_layers: int = 1,
        log_decay: Tensor | None = None,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.num_heads, self.mode, self.backend = num_heads, mode, backend
        check_depth(layer_idx, num_layers)
        inner = num_heads * head_width(dim, num_heads, head_dim)
        if log_decay is None:
            depth = 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5
            log_decay = -depth * 2.0 ** (-8 / num_heads * torch.arange(1, num_heads + 1))
        if not is_floats(log_decay, 1) or len(log_decay) != num_heads:
            raise ArgumentError("log_decay", f"floats [{num_heads}], or None", describe_tensor(log_decay))
        self.register_buffer("log_decay", log_decay.clone())
        self.qkv_proj = nn.Linear(dim, 3 * inner, bias=False)
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.norm = RMSNorm(inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        q, k, v = (split_heads(y, self.num_heads) for y in call.rows(F.silu, call.rows(self.qkv_proj, x)).chunk(3, -1))
        o, S = lightning_attention(
            q,
            k,
            v,
            self.log_decay,
            scale=1.0,
            initial_state=None if state is None else state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        gate, o = call.rows(self.gate_proj, x), call.rows(self.norm, merge_heads(o))
        o = call.rows(_gated, gate, o)
        return LayerOutput(call.rows(self.out_proj, o), LayerState(S) if call.output_state else None)


@by_element
def _swished(gate: Tensor, o: Tensor) -> Tensor:
    return F.silu(gate) * o


@by_element
def _gated(gate: Tensor, o: Tensor) -> Tensor:
    return torch.sigmoid(gate) * o
