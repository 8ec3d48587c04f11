"""Test-time training: a layer whose state is a linear model (Sun et al. 2024, arXiv 2407.04620)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..choices import Mode, RecurrenceBackend
from ..recurrences import ttt_linear
from .layer import (
    Layer,
    LayerCall,
    LayerOutput,
    LayerState,
    head_width,
    lengths,
    merge_heads,
    positive,
    split_heads,
    wide,
)
from .parts import RMSNorm


class TTTLinear(Layer):
    """TTT-Linear (arXiv 2407.04620, §2): the state W, c of each head is trained on the tokens as they come.

        q, k, v = x W,   η = rate · sigmoid(x W_η + b_η) / K,   out = (RMSNorm(TTT(q, k, v, η)) ⊙ GELU(x W_g)) W_O

    q and k have unit length. See `ttt_linear` for what a token does: mini-batches start at multiples of `mini_batch` in
    each document. In PyTorch; on a split sequence ranks follow one another, a group of heads at a time.

    The state is ``[N, H, 2K + 2, K]``: W over c as the mini-batch began, and below them the sums of gradients since.
    Where it goes on the host reads how many tokens were seen.

    Args:
        dim: D. num_heads: H. head_dim: K = V (default D / H). mini_batch: tokens whose gradients are taken at one W.
        rate: of the inner gradient descent.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        mini_batch: int = 16,
        rate: float = 1.0,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        self.K, self.num_heads = head_width(dim, num_heads, head_dim), num_heads
        self.mini_batch, self.rate = positive("mini_batch", mini_batch), float(rate)
        self.mode, self.backend = mode, backend
        inner = num_heads * self.K
        self.qkvg_proj = nn.Linear(dim, 4 * inner, bias=False)
        self.rate_proj = nn.Linear(dim, num_heads)
        self.inner_weight = nn.Parameter(torch.ones(num_heads, self.K))
        self.inner_bias = nn.Parameter(torch.zeros(num_heads, self.K))
        self.norm = RMSNorm(inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        *qkv, gate = call.rows(self.qkvg_proj, x).chunk(4, -1)
        rates = call.rows(self._rates, call.rows(self.rate_proj, x))
        tokens = [*(split_heads(y, self.num_heads) for y in qkv), rates]
        keywords: dict[str, Any] = dict(call.keywords)
        first: int | tuple[int, ...] = 0
        if state is not None:
            seen: Any = state.length
            first, keywords["initial_state"] = tuple((seen % self.mini_batch).tolist()), self._parts(state)
            if not call.packed and len(set(first)) > 1 and call.layout is None:  # rows at several places
                T = x.shape[1]
                tokens = [t.flatten(0, 1)[None] for t in tokens]
                keywords["cu_seqlens"] = torch.arange(0, x.shape[0] * T + 1, T, device=x.device)
        q, k, v, rates = tokens
        o, final = ttt_linear(
            q,
            k,
            v,
            rates,
            self.inner_weight,
            self.inner_bias,
            self.mini_batch,
            first=first,
            use_qk_l2norm=True,
            mode=self.mode,
            backend=self.backend,
            **keywords,
        )
        o = call.rows(self.norm, merge_heads(o).view(gate.shape))
        out = call.rows(self.out_proj, call.rows(lambda o, gate: o * F.gelu(gate), o, gate))
        if not call.output_state:
            return LayerOutput(out, None)
        length = lengths(x, None if state is None else state.length, call)
        if call.in_place and state is not None:
            return LayerOutput(out, state._replace(length=length))
        W, c, dW, dc = final  # type: ignore[misc]
        return LayerOutput(out, LayerState(torch.cat([W, c[:, :, None], dW, dc[:, :, None]], 2), length=length))

    def _rates(self, y: Tensor) -> Tensor:
        return torch.sigmoid(wide(y)) * (self.rate / self.K)

    def _parts(self, state: LayerState) -> tuple[Tensor, ...]:
        """The state as the recurrence has it, views of the layer's."""
        S: Any = state.recurrent
        K = self.K
        return S[..., :K, :], S[..., K, :], S[..., K + 1 : 2 * K + 1, :], S[..., 2 * K + 1, :]
