"""The delta rules: DeltaNet, gated DeltaNet and Kimi delta attention.

All three put q, k and v through one short convolution and SiLU, bring q and k to unit length, and normalise each head
of the output. They differ in the decay g and in the output gate.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import by_element
from ..checks import check_flag, is_finite
from ..choices import Mode, RecurrenceBackend
from ..errors import ArgumentError
from ..kernels.fused.log_decay import bounded_decay_gate, decay_gate
from ..kernels.tokens.gated_delta import Weights, fits, gated_delta_token
from ..kernels.tokens.products import PreNorm, added_product, normed_products
from ..outputs import LinearAttentionOutput
from ..recurrences import delta_rule, gated_delta_rule, kda
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
from .parts import GatedRMSNorm, RMSNorm, ShortConv
from .tokens import plain, plain_linear


class DeltaLayer(Layer):
    """q, k, v and β, as the three layers have them in common; arguments as in `DeltaNet`."""

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_value_heads: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = False,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.K = head_width(dim, num_heads, head_dim)
        self.V = self.K if value_dim is None else positive("value_dim", value_dim)
        self.num_heads = num_heads
        self.num_value_heads = num_heads if num_value_heads is None else positive("num_value_heads", num_value_heads)
        if self.num_value_heads % num_heads:
            raise ArgumentError("num_value_heads", f"a multiple of num_heads = {num_heads}", num_value_heads)
        check_flag("negative_eigenvalues", negative_eigenvalues)
        self.beta_max = 2.0 if negative_eigenvalues else 1.0
        self.mode, self.backend = mode, backend
        self.widths = [num_heads * self.K, num_heads * self.K, self.num_value_heads * self.V]
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.conv = ShortConv(sum(self.widths), conv_width)
        self.beta_proj = nn.Linear(dim, self.num_value_heads, bias=False)
        self.out_proj = nn.Linear(self.widths[2], dim, bias=False)
        self.make_gates()

    @by_element
    def _rates(self, y: Tensor) -> Tensor:
        rates = torch.sigmoid(wide(y))
        return rates if self.beta_max == 1 else self.beta_max * rates

    @abstractmethod
    def make_gates(self) -> None:
        """The modules of the layer's own: its decay, its output gate and its norm."""

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        state = state or LayerState()
        qkv, tail = self.conv(call.rows(self.qkv_proj, x), state.tail, call)
        q, k, v = qkv.split(self.widths, -1)
        q, k = split_heads(q, self.num_heads), split_heads(k, self.num_heads)
        v, b = split_heads(v, self.num_value_heads), call.rows(self.beta_proj, x)
        keywords = dict(initial_state=state.recurrent, mode=self.mode, backend=self.backend, **call.keywords)
        o, S = self.recur(x, call, q, k, v, call.rows(self._rates, b), use_qk_l2norm=True, **keywords)
        o = call.rows(self.out_proj, merge_heads(self.readout(x, o, call)))
        return LayerOutput(o, LayerState(S, tail) if call.output_state else None)

    @abstractmethod
    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        """The recurrence, with the layer's decay of `x`."""

    @abstractmethod
    def readout(self, x: Tensor, o: Tensor, call: LayerCall) -> Tensor:
        """Heads ``o [B, T, H, V]`` normalised, and gated by `x`."""


class DeltaNet(DeltaLayer):
    """DeltaNet (Yang et al. 2024, arXiv 2406.06484, §3.3): S ← (I − β k kᵀ) S + β k vᵀ, out = RMSNorm(heads) W_O.

    Args:
        dim: D. num_heads: heads of q and k. head_dim: K (default D / num_heads).
        num_value_heads: H, a multiple of num_heads (default the same). value_dim: V a head (default K).
        conv_width: W of the short convolution.
        negative_eigenvalues: β in (0, 2) instead of (0, 1) (Grazzi et al. 2024, arXiv 2411.12537).
        mode, backend: as in the recurrences.
    """

    def make_gates(self) -> None:
        self.norm = RMSNorm(self.V)

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        return delta_rule(q, k, v, beta, **keywords)

    def readout(self, x: Tensor, o: Tensor, call: LayerCall) -> Tensor:
        return call.rows(self.norm, o)


class GatedDeltaLayer(DeltaLayer):
    """One whose output is gated by `x`."""

    gate_proj: Any
    """A linear map, or several in a row."""
    norm: GatedRMSNorm

    def readout(self, x: Tensor, o: Tensor, call: LayerCall) -> Tensor:
        return call.rows(self.norm, o, split_heads(call.rows(self.gate_proj, x), self.num_value_heads))


class GatedDeltaNet(GatedDeltaLayer):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, eq. 10 and Fig. 1), as in Qwen3-Next and Qwen3.5.

        g = −e^{A_log} softplus(x W_a + dt_bias),   S ← e^g (I − β k kᵀ) S + β k vᵀ
        out = (RMSNorm(heads) ⊙ SiLU(x W_z)) W_O

    Arguments as in `DeltaNet`.
    """

    def make_gates(self) -> None:
        H = self.num_value_heads
        self.decay_proj = nn.Linear(self.dim, H, bias=False)
        self.A_log, self.dt_bias = decay_parameters(H, H)
        self.gate_proj = nn.Linear(self.dim, H * self.V, bias=False)
        self.norm = GatedRMSNorm(self.V)

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        g = call.rows(decay_gate, call.rows(self.decay_proj, x), shared=(self.A_log, self.dt_bias))
        return gated_delta_rule(q, k, v, g, beta, **keywords)

    def token(self, x: Tensor, norm: PreNorm, state: LayerState | None) -> Tensor | None:
        projections = [self.qkv_proj, self.beta_proj, self.decay_proj, self.gate_proj]
        parts = plain(self, GatedDeltaNet) and plain(self.norm, GatedRMSNorm)
        parts = parts and plain(self.conv, ShortConv) and self.conv.bias is None and self.norm.silu
        chosen = self.mode in ("auto", "recurrent") and self.backend in (None, "triton")
        if not (parts and chosen and plain_linear(x, *projections, self.out_proj)):
            return None
        S, tail = (state or LayerState())[:2]
        if S is None or tail is None or not fits(x, S):
            return None
        self.check(x, state, LayerCall(None, None, True, True))
        flat = x[:, 0]
        qkv, b, a, z = normed_products(flat, norm, projections)
        weights = Weights(self.conv.weight, self.A_log, self.dt_bias, self.norm.weight)
        gates = dict(beta_max=self.beta_max, eps=self.norm.eps)
        o = gated_delta_token(qkv, b, a, z, weights, tail, S, self.num_heads, **gates)
        return added_product(flat, o, self.out_proj)[:, None]


class KimiDeltaAttention(GatedDeltaLayer):
    """Kimi delta attention (Kimi Team 2025, arXiv 2510.26692, eq. 1 and §4): a decay for each key channel.

        g = −e^{A_log} softplus(x W_f↓ W_f↑ + dt_bias),   S ← (I − β k kᵀ) diag(e^g) S + β k vᵀ
        out = (RMSNorm(heads) ⊙ sigmoid(x W_g↓ W_g↑)) W_O

    The low ranks W↓ have V columns.

    Args:
        lower_bound: a number below 0 that g never falls below: g = lower_bound · sigmoid(e^{A_log} (x W_f↓ W_f↑ +
            dt_bias)), as in fla-core's layer and models that followed, whose bound is −5. With one of at least −5.125,
            bf16 and heads of 128, Hopper GPUs take faster kernels (`kda`). At first both gates decay alike. None: the
            paper's gate. The others as in `DeltaNet`.
    """

    def __init__(self, dim: int, num_heads: int, *, lower_bound: float | None = None, **options: Any) -> None:
        if lower_bound is not None and not (is_finite(lower_bound) and lower_bound < 0):
            raise ArgumentError("lower_bound", "a number below 0, or None", repr(lower_bound))
        self.lower_bound = lower_bound
        super().__init__(dim, num_heads, **options)

    def make_gates(self) -> None:
        dim, H, K, V = self.dim, self.num_value_heads, self.K, self.V
        self.decay_proj = nn.Sequential(nn.Linear(dim, V, bias=False), nn.Linear(V, H * K, bias=False))
        self.A_log, self.dt_bias = decay_parameters(H, H * K)
        if self.lower_bound is not None:
            with torch.no_grad():
                rate = self.A_log.exp().repeat_interleave(K)
                share = (rate * F.softplus(self.dt_bias) / -self.lower_bound).clamp(max=0.99)
                self.dt_bias.copy_(torch.logit(share) / rate)
        self.gate_proj = nn.Sequential(nn.Linear(dim, V, bias=False), nn.Linear(V, H * V, bias=False))
        self.norm = GatedRMSNorm(V, "sigmoid")

    def decay(self, x: Tensor, call: LayerCall) -> Tensor:
        """g ``[B, T, H, K]``."""
        gate: Any = decay_gate
        if self.lower_bound is not None:
            gate = functools.partial(bounded_decay_gate, lower_bound=self.lower_bound)
        g = call.rows(gate, call.rows(self.decay_proj, x), shared=(self.A_log, self.dt_bias))
        return split_heads(g, self.num_value_heads)

    def recur(
        self, x: Tensor, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **keywords: Any
    ) -> LinearAttentionOutput:
        return kda(q, k, v, self.decay(x, call), beta, lower_bound=self.lower_bound, **keywords)


def decay_parameters(heads: int, channels: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A_log ``[H]`` with e^{A_log} in [1, 16], and dt_bias with softplus(dt_bias) log-uniform in [1e-3, 1e-1]."""
    step = torch.empty(channels).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(torch.empty(heads).uniform_(1, 16).log()), nn.Parameter(inverse_softplus(step))
