"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..blockwise import AT_ONCE, by_block, by_element, linear, over, row_sum
from ..checks import check_depth
from ..choices import Mode, RecurrenceBackend
from ..context import ShardedLayout
from ..conv import token_shift
from ..kernels.fused.unit_length import l2norm
from ..recurrences import rwkv7
from .layer import Layer, LayerCall, LayerOutput, LayerState, divide, merge_heads, split_heads, wide
from .parts import HeadNorm


class LowRank(nn.Module):
    """``λ + f(x A) B``, with A zero at the start: the data-dependent part of a gate is learned."""

    def __init__(
        self, dim: int, rank: int, offset: Tensor | None, inner: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.down, self.inner = nn.Parameter(torch.zeros(dim, rank)), inner
        self.up = nn.Parameter(nn.init.orthogonal_(torch.empty(rank, dim), 0.1))
        self.offset = None if offset is None else nn.Parameter(offset)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.down.to(x.dtype)
        y = (y if self.inner is None else self.inner(y)) @ self.up.to(x.dtype)
        return wide(y) if self.offset is None else wide(y) + self.offset


def _low_rank(part: LowRank, layout: ShardedLayout, x: Tensor) -> Tensor:
    """All tokens at once."""
    y = linear(x, part.down.to(x.dtype).mT, layout=layout)
    y = y if part.inner is None else by_block(part.inner, y, layout=layout)
    y = wide(linear(y, part.up.to(x.dtype).mT, layout=layout))
    return y if part.offset is None else by_block(_plus, y, layout=layout, shared=(part.offset,))


@by_element
def _plus(y: Tensor, offset: Tensor) -> Tensor:
    return y + offset


AT_ONCE[LowRank] = _low_rank


class RWKV7(Layer):
    """The time mixing of RWKV-7 (arXiv 2503.14456, eq. 3–22).

        x^□ = x_t + (x_{t−1} − x_t) ⊙ μ_□                            for □ = r, w, k, v, a, g
        w = −e^{−1/2} sigmoid(λ_w + tanh(x^w A_w) B_w),              log-decay
        a = sigmoid(λ_a + x^a A_a B_a),   κ̂ = k ⊙ ξ / ‖·‖ per head,   k̃ = k ⊙ (1 + (a − 1) ⊙ α)
        S ← (diag(e^w) − (κ̂ ⊙ a) κ̂ᵀ) S + k̃ vᵀ,   o = Sᵀ r
        out = ((GroupNorm_h(o) + (r · (ρ ⊙ k̃)) v) ⊙ sigmoid(x^g A_g) B_g) W_O

    The mixing of values with those of the first layer (eq. 10) couples layers and is not part of this one.

    Args:
        dim: D. num_heads: H (default D / 64, as in the released models), K = V = D / H. With heads of 128, in bf16,
            Hopper GPUs take faster kernels (`rwkv7`).
        layer_idx, num_layers: depth the initial values depend on.
        mode, backend: as in the recurrences.
    """

    same_bits = True
    knows_depth = True

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        layer_idx: int = 0,
        num_layers: int = 1,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        check_depth(layer_idx, num_layers)
        H = self.num_heads = max(1, dim // 64) if num_heads is None else num_heads
        V = divide("num_heads", dim, H)
        self.mode, self.backend = mode, backend
        up, down = layer_idx / max(1, num_layers - 1), 1 - layer_idx / num_layers
        channel = torch.arange(dim) / dim
        powers = [0.2, 0.9, 0.7, 0.7, 0.9, 0.2]  # of r, w, k, v, a, g in the released initialisation
        self.mu = nn.Parameter(torch.stack([1 - channel ** (p * down) for p in powers]))
        self.r_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        speed = -6.5 + 5 * (torch.arange(dim) / max(1, dim - 1)) ** (0.85 + up**0.5)
        rank = max(32, 32 * round(1.8 * math.sqrt(dim) / 32))
        self.decay = LowRank(dim, rank, speed, torch.tanh)
        self.rate = LowRank(dim, rank, torch.zeros(dim))
        self.gate = LowRank(dim, max(32, 32 * round(0.6 * dim**0.8 / 32)), None, torch.sigmoid)
        self.xi, self.alpha = nn.Parameter(torch.full((dim,), 0.85)), nn.Parameter(torch.ones(dim))
        self.rho = nn.Parameter(torch.zeros(H, V))
        self.norm = HeadNorm(H, V, eps=1e-5 * V)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        for layer, size in ((self.r_proj, 0.5), (self.k_proj, 0.05), (self.v_proj, 0.5)):
            nn.init.uniform_(layer.weight, -size * dim**-0.5, size * dim**-0.5)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        state = state or LayerState()
        before, tail = token_shift(x, initial_state=state.tail, **call.keywords)
        xr, xw, xk, xv, xa, xg = call.rows(mixed, x, before, shared=(self.mu,))
        r, k, v = call.rows(self.r_proj, xr), call.rows(self.k_proj, xk), call.rows(self.v_proj, xv)
        w = call.rows(_log_decay, call.rows(self.decay, xw)).to(x.dtype)  # as the released kernels have it
        a = call.rows(torch.sigmoid, call.rows(self.rate, xa))
        k, removed, replaced = call.rows(self._keys, k, a, shared=(self.xi, self.alpha))
        r, v = self._heads(r), self._heads(v)
        o, S = rwkv7(
            r,
            self._heads(w),
            k,
            v,
            removed,
            replaced,
            scale=1.0,
            lower_bound=-0.61,
            initial_state=state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = merge_heads(call.rows(with_bonus, call.rows(self.norm, o), r, k, v, shared=(self.rho,)))
        o = (o * call.rows(self.gate, xg)).to(x.dtype)
        return LayerOutput(call.rows(self.out_proj, o), LayerState(S, tail) if call.output_state else None)

    @by_element
    def _keys(self, k: Tensor, a: Tensor, xi: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k̃, −κ̂ and κ̂ ⊙ a, in heads."""
        kappa = l2norm(self._heads(wide(k) * xi))
        written = (wide(k) * (1 + (a - 1) * alpha)).to(k.dtype)
        return self._heads(written), -kappa.to(k.dtype), (kappa * self._heads(a)).to(k.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.num_heads)


@by_element
def mixed(x: Tensor, before: Tensor, mu: Tensor) -> tuple[Tensor, ...]:
    """A token and its predecessor, mixed by each row of `mu`."""
    return tuple(x + (before - x) * part.to(x.dtype) for part in mu.unbind(-2))


@by_element
def _log_decay(y: Tensor) -> Tensor:
    return -math.exp(-0.5) * torch.sigmoid(y)


@by_element
def with_bonus(o: Tensor, r: Tensor, k: Tensor, v: Tensor, rho: Tensor) -> Tensor:
    """``o + (r · (ρ ⊙ k)) v``, in heads."""
    return wide(o) + over(row_sum(wide(r) * rho * wide(k)), v.shape[-1]) * wide(v)
