"""Forgetting attention: FoX (Lin et al. 2025, arXiv 2503.02130)."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..kernels.fused.log_decay import decay_gate
from ..keystore import KeySize, LayerKeys
from ..keystore.static import StaticKeys
from ..running_sum import running_sum
from ..softmax.forgetting import attention_with_sums
from ..softmax.sums import held_sums, sums_of, width_with_sums, with_sums
from .attention import Attention
from .decoding import KVCache, KVRows
from .layer import LayerCall, LayerOutput, last_tokens, split_heads


class ForgettingAttention(Attention):
    """The Forgetting Transformer's attention (arXiv 2503.02130, eq. 4): softmax attention with a forget gate a head.

        s_ij = K^(−1/2) q_iᵀ k_j + Σ_{j < t ≤ i} g_t,   g = log sigmoid(x W_f + b_f)

    With `qk_norm` and `gated` it has two of the parts of the paper's Pro block (not its norm of outputs, nor its shift
    of keys and values). Sums of g ride as further channels of keys, in a cache and in a `KeyStore`, too; the last one
    of each sequence is on every rank.

    Args:
        dim: D. num_heads: H. head_dim: K = V (default D / H). qk_norm, gated, window: as in `Attention`.
    """

    needs_runs = True
    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        qk_norm: bool = False,
        gated: bool = False,
        window: int = -1,
    ) -> None:
        options: dict[str, Any] = dict(head_dim=head_dim, qk_norm=qk_norm, gated=gated, window=window)
        super().__init__(dim, num_heads, rope_base=None, **options)
        self.forget_proj = nn.Linear(dim, num_heads)

    @property
    def key_size(self) -> KeySize:
        """What a token's key, its sums and its value take, for a `KeyStore`."""
        K, dtype = self.widths[1] // self.num_heads, self.qkv_proj.weight.dtype
        return KeySize(self.num_heads, width_with_sums(K, dtype), K)

    def carried_of(self, k: Tensor) -> Tensor:
        return sums_of(k, self.widths[1] // self.num_heads)

    def mix(self, x: Tensor, state: KVCache | KVRows | LayerKeys | StaticKeys | None, call: LayerCall) -> LayerOutput:
        q, k, v = (split_heads(y, self.num_heads) for y in call.rows(self.qkv_proj, x).split(self.widths, -1))
        g, K, before = call.rows(_log_forget, call.rows(self.forget_proj, x)), q.shape[-1], None
        if isinstance(state, (LayerKeys, StaticKeys)):
            before = state.carried
        elif state is not None and not call.packed:  # packed documents are refused further on
            before = sums_of(state.last_keys() if isinstance(state, KVRows) else state.k[:, -1], K)
        g, scale, held = g.double() * K**0.5, K**-0.5, functools.partial(held_sums, dtype=k.dtype)
        c = running_sum(g, call.layout, call.cu_seqlens, before, held)
        if isinstance(state, (LayerKeys, StaticKeys)):
            state.carry(last_tokens(c, call.layout, call.cu_seqlens))
        q, k = with_sums(call.rows(self.q_norm, q), call.rows(self.k_norm, k), c, exact=state is None)
        return self._attend(x, (q, k, v), state, call, scale)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attention_with_sums(q, k, v, self.widths[1] // self.num_heads, **options).o


def _log_forget(y: Tensor) -> Tensor:
    """The logarithm of a sigmoid."""
    return decay_gate(y, sign=-1.0)
