"""Sparse attention that was trained sparse: `ring_la.nsa` with its maps and gates.

The cache is the keys and values of all three branches. Decoding makes the compressed keys again of it for every token,
which reads what attention would read. With `LayerKeys` for a state compressed keys are kept, keys stay on the rank that
read them, and all ranks decode (`nsa.kept`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..keystore import KeySize, LayerKeys
from ..nsa import Sizes, check_sizes, nsa
from ..nsa.kept import attend, keep
from .decoding import KeyedLayer, KVCache, KVRows, cache_of, refuse_split_cache
from .layer import LayerCall, LayerOutput, divide, head_width, merge_heads, positions, split_heads
from .parts import check_rotation, rotate


class BlockMLP(nn.Module):
    """φ of the paper: blocks ``[B, N, l, Hk, K]`` to one row each, by an MLP over a block with its places added."""

    def __init__(self, length: int, width: int, rope_base: float | None) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(length, width))
        self.mlp = nn.Sequential(nn.Linear(length * width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.rope_base = rope_base

    def forward(self, blocks: Tensor, positions: Tensor) -> Tensor:
        x = blocks + self.place[:, None].to(blocks.dtype)
        y = self.mlp(x.transpose(2, 3).flatten(3))
        return y if self.rope_base is None else rotate(y, positions, self.rope_base)


class NativeSparseAttention(KeyedLayer):
    """Native Sparse Attention (DeepSeek-AI 2025, arXiv 2502.11089) with grouped key heads.

    Each branch has keys and values of its own. Compressed keys are made before the rotation and turned by the position
    of their block's first token; queries and the other keys by their own.

    Args:
        dim: D. num_heads: H. num_kv_heads: Hk, a divisor of H (default H). head_dim: K = V (default D / H).
        length, stride, block, topk, initial, local, window: as `ring_la.nsa`.
        rope_base: base of the rotary positions; None: none.
    """

    kept_alike = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        length: int = 32,
        stride: int = 16,
        block: int = 64,
        topk: int = 16,
        initial: int = 1,
        local: int = 2,
        window: int = 512,
        rope_base: float | None = 10000.0,
    ) -> None:
        super().__init__(dim)
        K = head_width(dim, num_heads, head_dim)
        check_rotation(rope_base, K)
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        divide("num_kv_heads", num_heads, self.num_kv_heads)
        self.rope_base = rope_base
        self.sizes: dict[str, Any] = dict(length=length, stride=stride, block=block, topk=topk)
        self.sizes |= dict(initial=initial, local=local, window=window)
        check_sizes(Sizes(length, stride, block, topk, initial, local), window)
        self.widths = [num_heads * K, *[3 * self.num_kv_heads * K] * 2]
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.gate_proj = nn.Linear(dim, 3 * num_heads)
        self.k_map, self.v_map = BlockMLP(length, K, rope_base), BlockMLP(length, K, None)
        self.out_proj = nn.Linear(num_heads * K, dim, bias=False)

    @property
    def key_size(self) -> KeySize:
        """What a token's keys and values take, for a `KeyStore`."""
        K = self.widths[0] // self.num_heads
        return KeySize(3 * self.num_kv_heads, K, K)

    def _check_cache(self, x: Tensor, cache: KVCache, call: LayerCall) -> None:
        refuse_split_cache(call)
        super()._check_cache(x, cache, call)

    def mix(self, x: Tensor, state: KVCache | KVRows | LayerKeys | None, call: LayerCall) -> LayerOutput:
        at, Hk = positions(x, None if state is None else state.length, call), self.num_kv_heads
        q, k, v = self.qkv_proj(x).split(self.widths, -1)
        q, k, v = split_heads(q, self.num_heads), split_heads(k, 3 * Hk), split_heads(v, 3 * Hk)
        if self.rope_base is not None:
            q = rotate(q, at, self.rope_base)
            k = torch.cat([k[:, :, :Hk], rotate(k[:, :, Hk:], at, self.rope_base)], 2)
        gates = torch.sigmoid(self.gate_proj(x)).unflatten(-1, (self.num_heads, 3))
        if state is None:
            o = self._attend(q, k, v, gates, layout=call.layout, cu_seqlens=call.cu_seqlens)
            state = cache_of(k, v, call) if call.output_state else None
        elif isinstance(state, LayerKeys):
            o = self._kept(q, k, v, gates, state, call)
        elif isinstance(state, KVRows):
            rows = state.written(k, v)
            of_rows = zip(q.split(1), *zip(*((a[None], b[None]) for a, b in rows)), gates.split(1))
            o = torch.cat([self._attend(*row) for row in of_rows])
        else:
            state = state.extend(k, v)
            o = self._after(q, state, gates)
        return LayerOutput(self.out_proj(merge_heads(o)), state if call.output_state else None)

    def _kept(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: LayerKeys, call: LayerCall) -> Tensor:
        """Keys stay on their ranks. Tokens of a layout behind others are read by all ranks together, as few are."""
        layout, maps = call.layout, (self.k_map, self.v_map)
        sizes = Sizes(*(self.sizes[name] for name in Sizes._fields))
        if layout is not None and not any(state.rows.earlier):
            keep(state, k, v, maps, sizes, layout)
            return self._attend(q, k, v, gates, layout=layout)
        if layout is not None:
            q, k, v, gates = (layout.gather(x) for x in (q, k, v, gates))
        keep(state, k, v, maps, sizes, layout)
        o = attend(q, gates, state, sizes, self.sizes["window"], q.shape[3] ** -0.5)
        return o if layout is None else layout.shard(o)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, **where: Any) -> Tensor:
        k, v = k.to(q.dtype), v.to(q.dtype)
        (k0, k1, k2), (v0, v1, v2) = k.chunk(3, 2), v.chunk(3, 2)
        return nsa(q, (k0, k1, k2), (v0, v1, v2), gates, self.k_map, self.v_map, **where, **self.sizes).o

    def _after(self, q: Tensor, cache: KVCache, gates: Tensor) -> Tensor:
        """The last tokens of each document over the whole of it, document by document where lengths differ."""
        if cache.empty is None:
            return self._attend(q, cache.k, cache.v, gates)
        begins = cache.empty.tolist()
        one = [(slice(n, n + 1), slice(a, None)) for n, a in enumerate(begins)]
        return torch.cat([self._attend(q[n], cache.k[n, a], cache.v[n, a], gates[n]) for n, a in one])
