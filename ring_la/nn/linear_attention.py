"""Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_flag
from ..choices import Mode, RecurrenceBackend
from ..recurrences import linear_attention
from .layer import Layer, LayerCall, LayerOutput, LayerState, head_width, merge_heads, split_heads


class LinearAttention(Layer):
    """Attention with the softmax replaced by a feature map φ(x) = elu(x) + 1 (eq. 7–8).

        o_t = φ(q_t)ᵀ Σ_{s≤t} φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_{s≤t} φ(k_s)

    Args:
        dim: D. num_heads: H. head_dim: K = V (default D / H).
        causal: False: every token reads its whole document, and what a state brings of earlier tokens.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        check_flag("causal", causal)
        self.num_heads, self.causal, self.mode, self.backend = num_heads, causal, mode, backend
        inner = num_heads * head_width(dim, num_heads, head_dim)
        self.qkv_proj = nn.Linear(dim, 3 * inner, bias=False)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        q, k, v = (split_heads(y, self.num_heads) for y in call.rows(self.qkv_proj, x).chunk(3, -1))
        o, S = linear_attention(
            call.rows(F.elu, q) + 1,
            call.rows(F.elu, k) + 1,
            v,
            causal=self.causal,
            normalize=True,
            initial_state=None if state is None else state.recurrent,
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        return LayerOutput(call.rows(self.out_proj, merge_heads(o)), LayerState(S) if call.output_state else None)
