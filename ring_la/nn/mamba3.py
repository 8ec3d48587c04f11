"""Mamba-3 (Lahoti et al. 2026, arXiv 2603.15569), with one input and output a head or several."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import is_finite
from ..choices import Mode, RecurrenceBackend
from ..errors import ArgumentError, describe_tensor
from ..recurrences import mamba3, mamba3_mimo
from .layer import (
    Layer,
    LayerCall,
    LayerOutput,
    LayerState,
    divide,
    head_width,
    inverse_softplus,
    merge_heads,
    positive,
    split_heads,
    wide,
)
from .parts import RMSNorm


class Mamba3(Layer):
    """The Mamba-3 block (arXiv 2603.15569): no convolution, angles of the tokens, trapezoidal writes.

        z, x, B, C, dt, a, λ, ϑ = in_proj(u);   Δ = softplus(dt + dt_bias),   g = −Δ max(softplus(a), 10⁻⁴)
        B, C = norm(B) + B_bias, norm(C) + C_bias, turned by Σ θ,   θ = π Δ tanh(ϑ),   λ = sigmoid(λ)
        S ← e^g (S + (1−λ)Δ B₋₁ x₋₁ᵀ) + λΔ B xᵀ,   out = ((Sᵀ C + D x) ⊙ SiLU(z)) W_O

    With `rank` r above 1 (MIMO) B and C are r a head, x_r = mimo_x_r ⊙ x, and what goes into W_O is
    Σ_r mimo_o_r ⊙ (Sᵀ C_r + D x_r) ⊙ SiLU(mimo_z_r ⊙ z). B and C turn channels k and k + K/2: the authors' weights
    with one rank are made for channels 2k and 2k + 1.

    The state is S, and as its tail B₋₁, x₋₁ and Σ θ of all heads side by side, ``[N, H·r·K + H·V + H·K/2]``.

    Args:
        dim: D. num_heads: H (default expand · D / head_dim). head_dim: V (default expand · D / H, or 64).
        state_dim: K, even. groups: G, groups of B and C before their biases.
        rank: r. expand: inner width over D. turned: share of the channels of B and C that turn.
        mode, backend: as in the recurrences.
    """

    same_bits = True
    cuts = "A token writes again with the next one, which a state has and a block has not"
    SLOWEST = 1e-4
    DT_RANGE = (1e-3, 1e-1)

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        groups: int = 1,
        rank: int = 1,
        expand: int = 2,
        turned: float = 0.5,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        positive("expand", expand)
        if num_heads is None:
            head_dim = 64 if head_dim is None else head_dim
            num_heads = divide("head_dim", expand * dim, head_dim)
        self.V = head_width(expand * dim, num_heads, head_dim)
        divide("groups", num_heads, groups)
        divide("state_dim", positive("state_dim", state_dim), 2)
        if not is_finite(turned) or not 0 < turned <= 1:
            raise ArgumentError("turned", "a number in (0, 1]", repr(turned))
        self.num_heads, self.groups, self.K, self.mode, self.backend = num_heads, groups, state_dim, mode, backend
        self.rank, self.angles = positive("rank", rank), max(1, int(turned * state_dim) // 2)
        self.state_shape = num_heads, state_dim, self.V
        inner, shared = num_heads * self.V, rank * groups * state_dim
        self.widths = [inner, inner, shared, shared, num_heads, num_heads, num_heads, self.angles]
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        low, high = (math.log(t) for t in self.DT_RANGE)
        self.dt_bias = nn.Parameter(inverse_softplus(torch.empty(num_heads).uniform_(low, high).exp()))
        self.B_norm, self.C_norm = (RMSNorm(state_dim, eps=1e-5) for _ in range(2))
        ranks = () if rank == 1 else (rank,)
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(num_heads, *ranks, state_dim)) for _ in range(2))
        if rank > 1:
            one = torch.ones(num_heads, rank, self.V)
            self.mimo_x, self.mimo_z, self.mimo_o = (nn.Parameter(t) for t in (one / rank, one.clone(), one / rank))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        z, u, B, C, dt, a, lam, turn = call.rows(self.in_proj, x).split(self.widths, -1)
        dt, g, lam, theta = call.rows(self._rates, dt, a, lam, turn, shared=(self.dt_bias,))
        several: dict[str, Any] = {} if self.rank == 1 else {"up": self.mimo_x}
        y, final = (mamba3 if self.rank == 1 else mamba3_mimo)(
            split_heads(u, self.num_heads),
            dt,
            g,
            call.rows(self._biased, call.rows(self.B_norm, self._grouped(B)), shared=(self.B_bias,)),
            call.rows(self._biased, call.rows(self.C_norm, self._grouped(C)), shared=(self.C_bias,)),
            lam,
            theta,
            self.D,
            initial_state=None if state is None else self._parted(state),
            mode=self.mode,
            backend=self.backend,
            **several,
            **call.keywords,
        )
        gates = () if self.rank == 1 else (self.mimo_z, self.mimo_o)
        o = call.rows(self.out_proj, call.rows(self._gated, y, z, shared=gates))
        if not call.output_state:
            return LayerOutput(o, None)
        if call.in_place:
            return LayerOutput(o, state)
        S, *last = final  # type: ignore[misc]
        return LayerOutput(o, LayerState(S, torch.cat([t.flatten(1) for t in last], -1)))

    def _rates(self, dt: Tensor, a: Tensor, lam: Tensor, turn: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
        """Δ, g, λ and θ."""
        dt = F.softplus(wide(dt) + dt_bias)
        theta = math.pi * dt[..., None] * F.pad(torch.tanh(wide(turn)), (0, self.K // 2 - self.angles))[:, :, None]
        return dt, -dt * F.softplus(wide(a)).clamp(min=self.SLOWEST), torch.sigmoid(wide(lam)), theta

    def _gated(self, y: Tensor, z: Tensor, *gates: Tensor) -> Tensor:
        """What goes into the output projection."""
        if self.rank == 1:
            return merge_heads(y) * F.silu(z)
        mimo_z, mimo_o = gates
        z = split_heads(z, self.num_heads)[:, :, None] * mimo_z.transpose(0, 1)
        return merge_heads((y * F.silu(z) * mimo_o.transpose(0, 1)).sum(2)).to(y.dtype)

    def _grouped(self, y: Tensor) -> Tensor:
        """B or C of every group, and of every rank of several."""
        return split_heads(y, self.groups) if self.rank == 1 else y.unflatten(-1, (self.rank, self.groups, self.K))

    def _biased(self, y: Tensor, bias: Tensor) -> Tensor:
        """B or C of every head."""
        y = y.repeat_interleave(self.num_heads // self.groups, -2)
        return (y + (bias if self.rank == 1 else bias.transpose(0, 1))).to(y.dtype)

    def _parted(self, state: LayerState) -> tuple[Any, ...]:
        """The state as the recurrence has it, views of the layer's."""
        shapes: list[tuple[int, ...]] = [(self.K,), (self.V,), (self.K // 2,)]
        if self.rank > 1:
            shapes[0] = (self.rank, self.K)
        tail, widths = state.tail, [self.num_heads * math.prod(shape) for shape in shapes]
        if not isinstance(tail, Tensor) or tail.dim() != 2 or tail.shape[1] != sum(widths):
            raise ArgumentError("state", f"what Mamba3 remembers, a tail [N, {sum(widths)}]", describe_tensor(tail))
        parts = tail.split(widths, -1)
        return (state.recurrent, *(t.unflatten(-1, (self.num_heads, *shape)) for t, shape in zip(parts, shapes)))
