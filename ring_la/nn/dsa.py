"""Attention over latents of the tokens that a small indexer picks.

What travels are index keys, to all ranks, and latents, as `ring_la.mla` sends chosen ones. The cache is latents, rotary
parts and index keys; with `LayerKeys` for a state they stay on the rank that read them, and all ranks decode. The
indexer learns from its own loss alone (`output_loss`), and what it reads passes no gradient on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import check_least
from ..choices import ChosenBackendName
from ..context import ShardedLayout
from ..errors import ArgumentError
from ..indexers import lightning_index, lightning_loss
from ..keystore import KeySize, LayerKeys, decode_index, decode_latents
from ..softmax import mla
from .decoding import KVCache, KVRows, begins, cache_of, each_document, each_row, refuse_split_cache
from .latent import MultiheadLatentAttention
from .layer import LayerCall, LayerOutput, merge_heads, positions, positive, split_heads, wide
from .parts import rotate


class IndexVectors(NamedTuple):
    """What an indexer scores tokens by: queries ``[B, T, Hi, D]``, keys ``[B, T, D]``, weights of heads
    ``[B, T, Hi]``."""

    q: Tensor
    k: Tensor
    w: Tensor


class LightningIndexer(nn.Module):
    """The maps of DeepSeek-V3.2's lightning indexer (eq. 1): few heads, one key for all of them.

    Args:
        dim, q_dim: channels of what keys and weights, and of what queries are made of. heads: Hi. width: D.
        rope_dim: the first channels, which are rotated. rope_base: of the rotation.
    """

    def __init__(self, dim: int, q_dim: int, heads: int, width: int, rope_dim: int, rope_base: float) -> None:
        super().__init__()
        self.heads, self.rope_dim, self.rope_base = heads, rope_dim, rope_base
        self.scale = (heads * width) ** -0.5
        self.q_proj = nn.Linear(q_dim, heads * width, bias=False)
        self.k_proj, self.k_norm = nn.Linear(dim, width, bias=False), nn.LayerNorm(width, eps=1e-6)
        self.w_proj = nn.Linear(dim, heads, bias=False)

    def forward(self, source: Tensor, x: Tensor, at: Tensor) -> IndexVectors:
        q, k = split_heads(self.q_proj(source), self.heads), self.k_norm(self.k_proj(x))[:, :, None]
        q, k = (
            torch.cat([rotate(y[..., : self.rope_dim], at, self.rope_base), y[..., self.rope_dim :]], -1)
            for y in (q, k)
        )
        return IndexVectors(q, k[:, :, 0].to(q.dtype), wide(self.w_proj(x)) * self.scale)


class DeepSeekSparseAttention(MultiheadLatentAttention):
    """DeepSeek Sparse Attention (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, §2.1): multi-head latent attention
    of each token to the `topk` earlier ones that a lightning indexer scores best.

    The layer's loss is the divergence of the indexer's scores from what attention gives the same tokens (eq. 4), the
    mean over the tokens of the whole sequence, times `index_loss`. Attention learns from the model's loss alone, the
    indexer from its own alone. With `topk` no less than a document, this is the paper's dense warm-up.

    Args:
        dim, num_heads, head_dim, rope_dim, value_dim, kv_rank, q_rank, rope_base: as `MultiheadLatentAttention`.
        topk: tokens that a token reads. index_heads: Hi. index_dim: D, channels of an index key, at least `rope_dim`.
        index_loss: what the indexer's loss is multiplied by; 0: there is none.
        backend: of attention to chosen latents, as `ring_la.mla`; index_backend: of scores, as `lightning_index`.
    """

    host_steps = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        topk: int = 2048,
        index_heads: int = 4,
        index_dim: int = 128,
        index_loss: float = 1.0,
        backend: ChosenBackendName | None = None,
        index_backend: str | None = None,
        **latents: Any,
    ) -> None:
        super().__init__(dim, num_heads, **latents)
        self.topk, R = positive("topk", topk), self.q_widths[1]
        if positive("index_dim", index_dim) < R:
            raise ArgumentError("index_dim", f"at least the rope_dim, {R}", index_dim)
        check_least("index_loss", index_loss)
        source = dim if self.q_down is None else self.q_proj.in_features
        heads = positive("index_heads", index_heads)
        self.indexer = LightningIndexer(dim, source, heads, index_dim, R, self.rope_base)
        self.index_loss, self.index_backend = index_loss, index_backend
        self.chosen_backend: ChosenBackendName | None = backend

    @property
    def key_size(self) -> KeySize:
        """What a token's latent and rotary part, and its index key, take in a `KeyStore`."""
        return KeySize(1, sum(self.widths), self.indexer.k_norm.normalized_shape[0])

    def _check_cache(self, x: Tensor, cache: KVCache, call: LayerCall) -> None:
        super()._check_cache(x, cache, call)
        refuse_split_cache(call)

    def mix(self, x: Tensor, state: Any, call: LayerCall) -> LayerOutput:
        at, source = positions(x, None if state is None else state.length, call), self._source(x, call)
        q, key, k_up, _ = self._made(source, x, at, call)
        index = self.indexer(source.detach(), x.detach(), at)
        loss, kept = None, index.k[:, :, None].to(key.dtype)
        if state is None or begins(state, call):
            o, loss = self._attend(q, key, k_up, index, call)
            if isinstance(state, LayerKeys):
                state.put(key, kept)
            else:
                state = cache_of(key, kept, call) if call.output_state else None
        elif isinstance(state, LayerKeys):
            state.put(key, kept)
            o = self._kept(q, index, state, call.layout)
        elif isinstance(state, KVRows):
            o = torch.cat([self._after(*row) for row in each_row(state, key, kept, q, index.q, index.w)])
        else:
            state = state.extend(key, kept)
            o = torch.cat([self._after(*row) for row in each_document(state, q, index.q, index.w)])
        state = state if call.output_state else None
        return LayerOutput(self.out_proj(merge_heads(o)), state, loss)

    def _attend(
        self, q: Tensor, key: Tensor, k_up: Tensor, index: IndexVectors, call: LayerCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to the chosen, without earlier tokens, and the indexer's loss where it is asked for."""
        where: dict[str, Any] = dict(layout=call.layout, cu_seqlens=call.cu_seqlens)
        chosen = lightning_index(*index, self.topk, backend=self.index_backend, **where).places
        (o, lse), loss = self._over(q, key, chosen, **where), None
        if call.output_loss and self.index_loss:
            with torch.no_grad():
                low = self._lowered(q, k_up)
            loss = lightning_loss(*index, chosen, low, key, attention_lse=lse, scale=q.shape[3] ** -0.5, **where)
            tokens = q.shape[0] * (q.shape[1] if call.layout is None else call.layout.seq_len)
            loss = loss * (self.index_loss / max(1, tokens))
        return o, loss

    def _kept(self, q: Tensor, index: IndexVectors, state: LayerKeys, layout: ShardedLayout | None) -> Tensor:
        """Keys stay on their ranks. Tokens of a layout behind others are read by all ranks together, as few are."""
        index_q, index_w = index.q, index.w
        if layout is not None:
            q, index_q, index_w = (layout.gather(y) for y in (q, index_q, index_w))
        chosen = decode_index(index_q, index_w, state.alone("value"), self.topk).places
        ups = self.k_up.to(q.dtype), self.v_up.to(q.dtype)
        o = decode_latents(q, state.alone("key"), *ups, chosen=chosen).o
        return o if layout is None else layout.shard(o)

    def _over(self, q: Tensor, key: Tensor, chosen: Tensor, **where: Any) -> tuple[Tensor, Tensor]:
        """Attention over latents and rotary parts ``[B, S, 1, L + R]`` of chosen places: o and lse."""
        latent, k_rope = key[:, :, 0].split(self.widths, -1)
        ups = self.k_up.to(q.dtype), self.v_up.to(q.dtype)
        out = mla(q, latent, k_rope, *ups, chosen=chosen, backend=self.chosen_backend, **where)
        return out.o, out.lse

    def _after(self, k: Tensor, v: Tensor, q: Tensor, index_q: Tensor, index_w: Tensor) -> Tensor:
        """The last tokens of one document, all of which is in the cache."""
        key, index_k = k.to(q.dtype), v[:, :, 0].to(index_q.dtype)
        chosen = lightning_index(index_q, index_k, index_w, self.topk, backend=self.index_backend).places
        return self._over(q, key, chosen)[0]
