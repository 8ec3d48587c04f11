"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import by_element
from ..checks import is_finite
from ..choices import Mode, RecurrenceBackend
from ..errors import ArgumentError
from ..recurrences import mamba2
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
)
from .parts import RMSNorm, ShortConv


class Mamba2(Layer):
    """The Mamba-2 block (arXiv 2405.21060, §7.1 and Fig. 6): gate, inputs, B, C and Δ from one projection.

        z, xBC, dt = in_proj(u);   x, B, C = SiLU(conv(xBC));   Δ = softplus(dt + dt_bias)
        S ← exp(−Δ e^{A_log}) S + B (Δ x)ᵀ,   y = Sᵀ C + D x,   out = norm(y ⊙ SiLU(z)) W_O

    Args:
        dim: D. num_heads: H (default expand · D / head_dim). head_dim: V (default expand · D / H, or 64).
        state_dim: K, shared by the heads of a group. groups: G, groups of B and C.
        conv_width: W. expand: inner width over D.
        dt_range: Δ at the start, log-uniform between these.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        groups: int = 1,
        conv_width: int = 4,
        expand: int = 2,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        positive("expand", expand)
        positive("state_dim", state_dim)
        pair = isinstance(dt_range, (tuple, list)) and len(dt_range) == 2 and all(is_finite(t) for t in dt_range)
        if not pair or not 0 < dt_range[0] <= dt_range[1]:
            raise ArgumentError("dt_range", "two numbers above 0, the smaller first", repr(dt_range))
        if num_heads is None:
            head_dim = 64 if head_dim is None else head_dim
            num_heads = divide("head_dim", expand * dim, head_dim)
        inner = num_heads * head_width(expand * dim, num_heads, head_dim)
        divide("groups", num_heads, groups)
        self.num_heads, self.groups, self.mode, self.backend = num_heads, groups, mode, backend
        self.parts = [inner, groups * state_dim, groups * state_dim]
        self.widths = [inner, sum(self.parts), num_heads, *self.more_widths(num_heads)]
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.conv = ShortConv(sum(self.parts), conv_width, bias=True)
        low, high = (math.log(t) for t in dt_range)
        self.dt_bias = nn.Parameter(inverse_softplus(torch.empty(num_heads).uniform_(low, high).exp()))
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = RMSNorm(inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def more_widths(self, num_heads: int) -> list[int]:
        """Of what else the input projection gives."""
        return []

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        state = state or LayerState()
        z, xBC, dt = call.rows(self.in_proj, x).split(self.widths, -1)
        xBC, tail = self.conv(xBC, state.tail, call)
        u, B, C = xBC.split(self.parts, -1)
        y, S = mamba2(
            split_heads(u, self.num_heads),
            dt,
            call.of_parameters(_rates, self.A_log),
            split_heads(B, self.groups),
            split_heads(C, self.groups),
            self.D,
            self.dt_bias,
            dt_softplus=True,
            initial_state=state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        return LayerOutput(self.behind(y, z, call), LayerState(S, tail) if call.output_state else None)

    def behind(self, y: Tensor, z: Tensor, call: LayerCall) -> Tensor:
        """The output, of heads y and the gate."""
        gated = call.rows(_gated, merge_heads(y), z)
        return call.rows(self.out_proj, call.rows(self.norm, gated))


def _rates(A_log: Tensor) -> Tensor:
    return -A_log.exp()


@by_element
def _gated(y: Tensor, z: Tensor) -> Tensor:
    return y * F.silu(z)
