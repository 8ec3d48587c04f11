"""RWKV-6 (Peng et al. 2024, arXiv 2404.05892)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_depth
from ..choices import Mode, RecurrenceBackend
from ..conv import token_shift
from ..recurrences import rwkv6
from .layer import Layer, LayerCall, LayerOutput, LayerState, divide, merge_heads, positive, split_heads, wide
from .parts import HeadNorm
from .rwkv7 import LowRank


class RWKV6(Layer):
    """The time mixing of RWKV-6 (Finch; arXiv 2404.05892).

        δ = x_{t−1} − x_t,   x^□ = x_t + δ ⊙ (λ_□ + tanh((x_t + δ ⊙ μ) A_□) B_□)            for □ = r, k, v, g, w
        w = −exp(λ_d + tanh(x^w A_d) B_d),   o = (S + diag(u) k vᵀ)ᵀ r,   S ← diag(e^w) S + k vᵀ
        out = (GroupNorm_h(o) ⊙ SiLU(x^g W_g)) W_O

    Args:
        dim: D. num_heads: H (default D / 64), K = V = D / H.
        mix_rank, decay_rank: width between A and B, of the five mixes and of the decay.
        layer_idx, num_layers: depth the initial values depend on.
        mode, backend: as in the recurrences.
    """

    same_bits = True
    knows_depth = True
    cuts = "A block's last token is written in the next block, and a state holds it already"

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        mix_rank: int = 32,
        decay_rank: int = 64,
        layer_idx: int = 0,
        num_layers: int = 1,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        check_depth(layer_idx, num_layers)
        positive("mix_rank", mix_rank)
        positive("decay_rank", decay_rank)
        H = self.num_heads = max(1, dim // 64) if num_heads is None else num_heads
        V = divide("num_heads", dim, H)
        self.mode, self.backend = mode, backend
        up, down = layer_idx / max(1, num_layers - 1), 1 - layer_idx / num_layers
        channel, place = torch.arange(dim) / dim, torch.arange(dim) / max(1, dim - 1)
        full, half = 1 - channel**down, 1 - channel ** (down / 2)
        self.mu = nn.Parameter(full.clone())
        self.mixes = nn.ModuleList(
            LowRank(dim, mix_rank, offset, torch.tanh)
            for offset in (half.clone(), full.clone(), full - 0.3 * up, half.clone(), full.clone())
        )
        self.decay = LowRank(dim, decay_rank, -6 + 5 * place ** (0.7 + 1.3 * up), torch.tanh)
        self.bonus = nn.Parameter((up * (1 - place) + 0.1 * ((torch.arange(dim) + 1) % 3 - 1)).view(H, V))
        self.r_proj, self.k_proj, self.v_proj, self.g_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm = HeadNorm(H, V, eps=1e-5 * V)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        state = state or LayerState()
        before, tail = token_shift(x, initial_state=state.tail, **call.keywords)
        mean = call.rows(_toward, x, before, shared=(self.mu,))
        xr, xk, xv, xg, xw = (call.rows(_toward, x, before, call.rows(part, mean)) for part in self.mixes)
        r, k, v = call.rows(self.r_proj, xr), call.rows(self.k_proj, xk), call.rows(self.v_proj, xv)
        o, S = rwkv6(
            self._heads(r),
            self._heads(k),
            self._heads(v),
            self._heads(call.rows(_log_decay, call.rows(self.decay, xw))),
            self.bonus,
            scale=1.0,
            initial_state=state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        gate = call.rows(F.silu, call.rows(self.g_proj, xg))
        o = (merge_heads(call.rows(self.norm, o)) * gate).to(x.dtype)
        return LayerOutput(call.rows(self.out_proj, o), LayerState(S, tail) if call.output_state else None)

    def _heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.num_heads)


def _toward(x: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    """A token, moved toward its predecessor."""
    return x + (before - x) * weight.to(x.dtype)


def _log_decay(y: Tensor) -> Tensor:
    return -torch.exp(wide(y))
