"""Softmax attention to blocks that are chosen by their mean keys; it has no parameters more than attention.

The cache is that of attention. With `LayerKeys` for a state keys stay on the rank that read them, and all ranks choose
and decode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_flag
from ..choices import ChosenBackendName
from ..context import ShardedLayout
from ..indexers import block_index
from ..keystore import LayerKeys, decode_attention, decode_blocks
from ..softmax import sparse_attention
from .decoding import (
    GroupedLayer,
    KVCache,
    KVRows,
    begins,
    cache_of,
    each_document,
    each_row,
    refuse_split_cache,
)
from .layer import LayerCall, LayerOutput, divide, head_width, merge_heads, positions, positive, split_heads
from .parts import RMSNorm, check_rotation, rotate


class MixtureOfBlockAttention(GroupedLayer):
    """MoBA, mixture of block attention (Lu et al. 2025, arXiv 2502.13189, eq. 5 and 6), with grouped key heads.

    A token reads the block it stands in and those full before it with the largest product of its query and their mean
    key; query heads that share a key head choose together.

    Args:
        dim: D. num_heads: H. num_kv_heads: Hk, a divisor of H (default H). head_dim: K = V (default D / H).
        block: tokens of a block. topk: blocks that a token reads, its own among them.
        rope_base: base of the rotary positions; None: none. qk_norm: RMSNorm on each head of q and k before it.
        backend: of attention to chosen blocks, as `ring_la.sparse_attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        block: int = 512,
        topk: int = 3,
        rope_base: float | None = 10000.0,
        qk_norm: bool = False,
        backend: ChosenBackendName | None = None,
    ) -> None:
        super().__init__(dim)
        K = head_width(dim, num_heads, head_dim)
        check_rotation(rope_base, K)
        check_flag("qk_norm", qk_norm)
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        divide("num_kv_heads", num_heads, self.num_kv_heads)
        self.block, self.topk = positive("block", block), positive("topk", topk)
        self.rope_base = rope_base
        self.chosen_backend: ChosenBackendName | None = backend
        self.widths = [num_heads * K, self.num_kv_heads * K, self.num_kv_heads * K]
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.q_norm, self.k_norm = (RMSNorm(K) if qk_norm else nn.Identity() for _ in range(2))
        self.out_proj = nn.Linear(num_heads * K, dim, bias=False)

    def _check_cache(self, x: Tensor, cache: KVCache, call: LayerCall) -> None:
        refuse_split_cache(call)
        super()._check_cache(x, cache, call)

    def mix(self, x: Tensor, state: KVCache | KVRows | LayerKeys | None, call: LayerCall) -> LayerOutput:
        q, k, v = self.qkv_proj(x).split(self.widths, -1)
        q, k = self.q_norm(split_heads(q, self.num_heads)), self.k_norm(split_heads(k, self.num_kv_heads))
        v = split_heads(v, self.num_kv_heads)
        if self.rope_base is not None:
            at = positions(x, None if state is None else state.length, call)
            q, k = (rotate(y, at, self.rope_base) for y in (q, k))
        if state is None or begins(state, call):
            o = self._over(q, k, v, layout=call.layout, cu_seqlens=call.cu_seqlens)
            if isinstance(state, LayerKeys):
                state.put(k, v)
            else:
                state = cache_of(k, v, call) if call.output_state else None
        elif isinstance(state, LayerKeys):
            state.put(k, v)
            o = self._kept(q, state, call.layout)
        elif isinstance(state, KVRows):
            o = torch.cat([self._after(*row) for row in each_row(state, k, v, q)])
        else:
            state = state.extend(k, v)
            o = torch.cat([self._after(*row) for row in each_document(state, q)])
        return LayerOutput(self.out_proj(merge_heads(o)), state if call.output_state else None)

    def _kept(self, q: Tensor, state: LayerKeys, layout: ShardedLayout | None) -> Tensor:
        """Keys stay on their ranks. Tokens of a layout behind others are read by all ranks together, as few are."""
        q = q if layout is None else layout.gather(q)
        chosen = decode_blocks(q, state, self.block, self.topk).places
        o = decode_attention(q, state, chosen=chosen, block=self.block).o
        return o if layout is None else layout.shard(o)

    def _over(self, q: Tensor, k: Tensor, v: Tensor, **where: Any) -> Tensor:
        """Attention to the blocks that queries choose."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        chosen = block_index(q, k, self.block, self.topk, **where).places
        return sparse_attention(q, k, v, chosen, block=self.block, backend=self.chosen_backend, **where).o

    def _after(self, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        """The last tokens of one document, all of which is in the cache."""
        return self._over(q, k, v)
