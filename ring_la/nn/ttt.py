"""Test-time training: a layer whose state is a linear model (Sun et al. 2024, arXiv 2407.04620)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_above_zero
from ..choices import Mode, RecurrenceBackend
from ..kernels.fused.unit_length import l2norm
from ..recurrences import ttt_linear
from ..recurrences.ttt import one_token
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
    Where more than one token goes on the host reads how many were seen.

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
        self.mini_batch, self.rate = positive("mini_batch", mini_batch), rate
        check_above_zero("rate", rate)
        self.mode, self.backend = mode, backend
        self.state_shape = num_heads, 2 * self.K + 2, self.K
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
        if state is not None and self._one_token(x, state, call):
            return self._stepped(tokens, gate, state, call)
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
        out = self._gated(o, gate, call)
        if not call.output_state:
            return LayerOutput(out, None)
        length = lengths(x, None if state is None else state.length, call)
        if call.in_place and state is not None:
            return LayerOutput(out, state._replace(length=length))
        W, c, dW, dc = final  # type: ignore[misc]
        return LayerOutput(out, LayerState(torch.cat([W, c[:, :, None], dW, dc[:, :, None]], 2), length=length))

    def _gated(self, o: Tensor, gate: Tensor, call: LayerCall) -> Tensor:
        o = call.rows(self.norm, merge_heads(o).view(gate.shape))
        return call.rows(self.out_proj, call.rows(lambda o, gate: o * F.gelu(gate), o, gate))

    def _one_token(self, x: Tensor, state: LayerState, call: LayerCall) -> bool:
        """Whether each document has one more token: a step that the device makes without the host."""
        if x.shape[1] != 1 or call.packed or call.layout is not None or self.backend not in (None, "torch"):
            return False
        S, N = state.recurrent, x.shape[0]
        fits = S is not None and S.shape == (N, self.num_heads, 2 * self.K + 2, self.K) and S.dtype == wide(x).dtype
        fits = fits and state.length is not None and state.length.shape == (N,)
        return bool(fits) and not (call.in_place and torch.is_grad_enabled())

    def _stepped(self, tokens: list[Tensor], gate: Tensor, state: LayerState, call: LayerCall) -> LayerOutput:
        q, k, v, rates = tokens
        S, seen = state.recurrent, state.length
        assert S is not None
        assert seen is not None
        both = S.unflatten(2, (2, -1))
        o, new = one_token(
            (l2norm(q), l2norm(k), v, rates), self.inner_weight, self.inner_bias, both, seen, self.mini_batch
        )
        out, S_new = self._gated(o, gate, call), new.flatten(2, 3)
        if not call.output_state:
            return LayerOutput(out, None)
        if call.in_place:
            S_new = S.copy_(S_new)
        return LayerOutput(out, LayerState(S_new, length=seen + 1))

    def _rates(self, y: Tensor) -> Tensor:
        return torch.sigmoid(wide(y)) * (self.rate / self.K)

    def _parts(self, state: LayerState) -> tuple[Tensor, ...]:
        """The state as the recurrence has it, views of the layer's."""
        S: Any = state.recurrent
        K = self.K
        return S[..., :K, :], S[..., K, :], S[..., K + 1 : 2 * K + 1, :], S[..., 2 * K + 1, :]
